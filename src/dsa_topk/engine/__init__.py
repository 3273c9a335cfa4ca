"""What an inference engine plugs in: backends by name, every layout through one fused call, metadata, settings.

>>> from dsa_topk.engine import DSATopKBackend, TopkMetadata, TopkTransformMethod
>>> backend = DSATopKBackend.parse("cuda")
>>> slots = backend.topk_transform(scores, lengths, 2048, TopkTransformMethod.PAGED, metadata)

What was chosen is logged once per kind of call (logger ``dsa_topk.engine``, level INFO) and can be asked for with
``backend.explain(...)``.
"""

from __future__ import annotations

from dsa_topk.engine.backend import DSATopKBackend, EngineExplanation
from dsa_topk.engine.indexer import BaseIndexerMetadata
from dsa_topk.engine.metadata import TopkMetadata, TopkMetadataLike
from dsa_topk.engine.route import Route, TopkTransformMethod
from dsa_topk.engine.settings import Settings

__all__ = [
    "BaseIndexerMetadata",
    "DSATopKBackend",
    "EngineExplanation",
    "Route",
    "Settings",
    "TopkMetadata",
    "TopkMetadataLike",
    "TopkTransformMethod",
]
