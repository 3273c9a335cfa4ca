"""Benchmarks: the timing core, the suites, peers as contestants, result files, comparison and figures.

>>> from dsa_topk.bench import app
>>> app.run(app.Options(suites=["smoke"], peers="none"))

The pieces: ``cases`` (what is timed), ``inputs`` (its tensors), ``timing`` (how), ``floor`` and ``peers`` (against
what), ``session`` (the run), ``record`` (the file), ``compare``, ``figures``, ``docs`` (what is made of it).
"""
