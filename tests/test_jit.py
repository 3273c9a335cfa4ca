"""dsa_topk.jit in peace: keys, cache, environment, loading, status, the build command."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

import jit_fixture
from dsa_topk import jit
from dsa_topk.jit import archs, core, source, toolchain
from jit_fixture import Workshop, answer

workshop = jit_fixture.workshop


@pytest.fixture
def no_nvcc(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    monkeypatch.delenv("CUDA_HOME")
    nothing = toolchain.Search(None, (("PATH", "nothing found"),))
    monkeypatch.setattr(toolchain, "search", lambda: nothing)
    return workshop


# --- the key


def test_key_ignores_places(workshop: Workshop, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "deep"
    shutil.copytree(workshop.sources, moved)
    assert jit.Finder(moved).content == workshop.finder().content


def test_key_changes_with_every_kind_of_content(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {workshop.finder().content}

    def changed() -> None:
        content = workshop.finder().content
        assert content not in keys
        keys.add(content)

    workshop.set_answer(43)
    changed()
    (workshop.sources / "extra.cuh").write_text("")
    changed()
    (workshop.sources / "extra.cuh").rename(workshop.sources / "other.cuh")
    changed()
    text = (workshop.sources / "module.cu").read_text()
    (workshop.sources / "module.cu").write_text(text[:-2])
    (workshop.sources / "other.cuh").write_text(text[-2:])  # same bytes in all, another border
    changed()
    monkeypatch.setattr(source, "DEVICE_FLAGS", (*source.DEVICE_FLAGS, "-g"))
    changed()
    monkeypatch.setattr(source, "LINK_FLAGS", (*source.LINK_FLAGS, "-lrt"))
    changed()
    monkeypatch.setattr(source, "BUILDER_ABI", source.BUILDER_ABI + 1)
    changed()
    monkeypatch.setattr(source, "tvm_ffi_version", lambda: "0.0.1")
    changed()
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    changed()
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-DSOMETHING")
    changed()


def test_key_ignores_the_place_of_the_host_compiler(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    before = workshop.finder().content
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "-ccbin=/opt/conda/bin/g++")
    assert workshop.finder().content == before
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "-ccbin /opt/conda/bin/g++")
    assert workshop.finder().content == before


def test_other_files_in_the_folder_do_not_count(workshop: Workshop) -> None:
    before = workshop.finder().content
    (workshop.sources / "README.md").write_text("x")
    assert workshop.finder().content == before


# --- cold, warm, found


def test_cold_then_warm(workshop: Workshop) -> None:
    cold = workshop.build()
    assert (cold.how, workshop.runs(), answer(cold.path)) == ("built", 1, 42)
    warm = workshop.build()
    assert (warm.how, warm.path, workshop.runs()) == ("cached", cold.path, 1)
    assert workshop.leftovers() == []


def test_changed_sources_get_their_own_build(workshop: Workshop) -> None:
    first = workshop.build()
    workshop.set_answer(43)
    second = workshop.build()
    assert second.path != first.path
    assert (answer(first.path), answer(second.path)) == (42, 43)


def test_a_source_edited_during_the_build_does_not_leak_into_it(workshop: Workshop) -> None:
    workshop.hook(f"echo '#define ANSWER 666' > {workshop.sources}/answer.cuh")
    assert answer(workshop.build().path) == 42
    workshop.set_answer(44)
    finder = workshop.finder()
    workshop.set_answer(45)  # after it was read for the key, before it is compiled
    found = jit.obtain(("90a",), finder=finder)
    assert found is not None
    assert answer(found.path) == 44


def test_two_compilers_get_two_builds(workshop: Workshop) -> None:
    first = workshop.build()
    workshop.set_version("13.1")  # behind an unchanged wrapper script
    second = workshop.build()
    assert second.how == "built"
    assert second.key != first.key
    assert workshop.runs() == 2
    workshop.set_version("13.0")
    assert workshop.build().key == first.key


def test_find_never_compiles(workshop: Workshop) -> None:
    assert jit.find("90a", finder=workshop.finder()) is None
    assert workshop.runs() == 0
    assert not workshop.cache.exists()
    path = jit.build(["90a", "100"], finder=workshop.finder())
    for part in ("90a", "100", ["100", "90a"]):
        assert jit.find(part, finder=workshop.finder()) == path
    assert jit.find(["90a", "120"], finder=workshop.finder()) is None


def test_a_fat_build_serves_one_of_its_targets(workshop: Workshop) -> None:
    fat = workshop.build("80", "90a", "100")
    assert workshop.build("90a").path == fat.path
    assert workshop.runs() == 1


def test_the_smallest_fitting_build_is_taken(workshop: Workshop) -> None:
    single = workshop.build("90a")
    workshop.build("80", "90a")
    assert workshop.build("90a").path == single.path


def test_the_best_target_is_taken(workshop: Workshop) -> None:
    workshop.build("100")
    family = workshop.build("100f")
    found = jit.obtain(("100",), archs.acceptable((10, 3)), finder=workshop.finder())
    assert found is not None
    assert found.path == family.path


def test_packaged_build_comes_first_and_needs_no_compiler(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    jit.build("90a", workshop.home / "aot", finder=workshop.finder())
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    monkeypatch.setenv("DSA_TOPK_DISABLE_JIT", "1")
    found = workshop.build()
    assert (found.how, answer(found.path)) == ("package", 42)
    monkeypatch.delenv("DSA_TOPK_DISABLE_JIT")
    monkeypatch.setenv("CUDA_HOME", str(workshop.toolkit))
    workshop.set_answer(43)  # not what was packaged
    found = workshop.build()
    assert (found.how, answer(found.path)) == ("built", 43)


def test_damaged_packaged_build_is_passed_over(workshop: Workshop) -> None:
    path = jit.build("90a", workshop.home / "aot", finder=workshop.finder())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert workshop.build().how == "built"


def test_explicit_cache_dir_is_the_only_one_used(workshop: Workshop) -> None:
    path = jit.build("90a", workshop.home / "image", finder=workshop.finder())
    assert path.is_relative_to(workshop.home / "image")
    assert not workshop.cache.exists()


# --- environment


def test_disable_jit_names_key_and_three_ways_out(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSA_TOPK_DISABLE_JIT", "1")
    with pytest.raises(jit.MissingBuildError) as caught:
        workshop.build("80", "90a")
    text = str(caught.value)
    assert caught.value.key.endswith("-80.90a")
    assert workshop.finder().content in caught.value.key
    for expected in (caught.value.key, "dsa-topk build --arch 80,90a", "unset DSA_TOPK_DISABLE_JIT", 'backend="torch"'):
        assert expected in text
    assert workshop.runs() == 0


def test_disable_jit_takes_a_build_of_another_compiler(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    path = workshop.build().path
    workshop.set_version("12.9")
    monkeypatch.setenv("DSA_TOPK_DISABLE_JIT", "1")
    assert workshop.build().path == path


@pytest.mark.parametrize("value", ["", "0", "false", "No"])
def test_disable_jit_can_be_off(workshop: Workshop, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("DSA_TOPK_DISABLE_JIT", value)
    assert not core.disabled()


def test_no_nvcc_without_a_build_names_three_ways_out(no_nvcc: Workshop) -> None:
    with pytest.raises(jit.JitError) as caught:
        no_nvcc.build()
    for expected in ("90a", "CUDA_HOME", "pip install", "dsa-topk build", 'backend="torch"'):
        assert expected in str(caught.value)


def test_no_nvcc_with_a_build_works(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    path = workshop.build().path
    monkeypatch.setattr(toolchain, "search", lambda: toolchain.Search(None, ()))
    assert workshop.build().path == path


def test_nvcc_that_does_not_run_counts_as_none(workshop: Workshop) -> None:
    path = workshop.build().path
    (workshop.toolkit / "bin" / "nvcc").write_text("#!/bin/sh\nexit 3\n")
    assert workshop.build().path == path
    workshop.set_answer(43)
    with pytest.raises(jit.JitError, match="no usable nvcc"):
        workshop.build()


def test_archs_from_the_environment(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSA_TOPK_CUDA_ARCHS", "100,80")
    assert core.configured_archs() == ("80", "100")
    assert jit._targets(None, (8, 6)) == (("80", "100"), ("80",))
    assert jit._targets(None, None) == (("80", "100"), ("80", "100"))
    with pytest.warns(RuntimeWarning, match="does not serve"):
        assert jit._targets(None, (9, 0))[0] == ("90a",)
    monkeypatch.setenv("DSA_TOPK_CUDA_ARCHS", "tesla")
    with pytest.raises(ValueError, match="DSA_TOPK_CUDA_ARCHS"):
        core.configured_archs()


def test_without_device_and_archs_the_error_says_what_to_set(workshop: Workshop) -> None:
    with pytest.raises(jit.JitError, match="DSA_TOPK_CUDA_ARCHS"):
        jit._targets(None, None)


def test_load_names_a_device_that_is_too_old() -> None:
    with pytest.raises(jit.JitError, match=r"7\.5"):
        jit._targets(None, (7, 5))


# --- loading


def test_load_is_one_object_for_all_threads(workshop: Workshop) -> None:
    finder, modules = workshop.finder(), []
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        modules.append(jit.load("90a", finder=finder))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(modules) == 8
    assert len({id(module) for module in modules}) == 1
    assert modules[0].answer() == 42
    assert workshop.runs() == 1


def test_load_refuses_several_targets(workshop: Workshop) -> None:
    with pytest.raises(ValueError, match="one architecture"):
        jit.load("80,90a", finder=workshop.finder())


def test_load_says_when_the_driver_is_too_old(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "driver_release", lambda: (12, 8))
    monkeypatch.setattr(jit, "_capability", lambda _: (9, 0))
    with pytest.raises(jit.JitError, match=r"CUDA 13\.0.*CUDA 12\.8"):
        jit.load(finder=workshop.finder())
    monkeypatch.setattr(toolchain, "driver_release", lambda: (13, 0))
    assert jit.load(finder=workshop.finder()).answer() == 42


def test_a_child_forked_during_a_build_can_build(workshop: Workshop) -> None:
    """Guards the lock reset after fork: without it the child waits for a thread that does not exist there."""
    code = """
    import threading
    held = threading.Event()
    def hold():
        with jit._lock:
            held.set()
            threading.Event().wait(30)
    threading.Thread(target=hold, daemon=True).start()
    held.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if jit._lock.acquire(timeout=5) else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    sys.exit(0)
    """
    process = workshop.start(code)
    out, err = process.communicate(timeout=60)
    assert out.strip() == "0", err


# --- status and reasons


def test_unavailable_reason(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "Finder", workshop.finder)
    assert jit.unavailable_reason() is None  # nvcc is there
    monkeypatch.setattr(toolchain, "search", lambda: toolchain.Search(None, ()))
    assert jit.unavailable_reason() is None  # remembered for this environment
    monkeypatch.delenv("CUDA_HOME")
    assert "no nvcc" in (jit.unavailable_reason() or "")
    monkeypatch.setenv("DSA_TOPK_DISABLE_JIT", "1")
    assert "DSA_TOPK_DISABLE_JIT" in (jit.unavailable_reason() or "")


def test_unavailable_reason_sees_cached_builds(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "Finder", workshop.finder)
    workshop.build("90a")
    monkeypatch.setattr(toolchain, "search", lambda: toolchain.Search(None, ()))
    assert jit.unavailable_reason() is None
    assert jit.unavailable_reason("90a") is None
    assert "no nvcc" in (jit.unavailable_reason("100") or "")
    monkeypatch.setattr(source, "tvm_ffi_version", lambda: None)
    assert "apache-tvm-ffi" in (jit._reason(None) or "")


def test_status_reports_compiler_cache_and_builds(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "Finder", workshop.finder)
    first = workshop.build("80", "90a")
    workshop.set_answer(43)
    now = jit.status()
    assert (now.nvcc, now.nvcc_how) == (workshop.toolkit / "bin" / "nvcc", "CUDA_HOME")
    assert "release 13.0" in (now.nvcc_version or "")
    assert now.cache_dir == workshop.cache
    assert [(b.key, b.archs, b.current) for b in now.builds] == [(first.key, ("80", "90a"), False)]
    assert workshop.build("90a").key in {b.key for b in jit.status().builds if b.current}
    assert now.reason is None


def test_importing_jit_imports_nothing_heavy(workshop: Workshop) -> None:
    code = "print(sorted({'torch', 'numpy', 'tvm_ffi', 'typer', 'rich'} & set(sys.modules))); sys.exit(0)"
    out, err = workshop.start(code).communicate(timeout=60)
    assert out.strip() == "[]", err


# --- the command


def test_build_command(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    typer = pytest.importorskip("typer")
    from typer.testing import CliRunner

    from dsa_topk.cli import CliError
    from dsa_topk.cli import build as command

    monkeypatch.setattr(core, "Finder", workshop.finder)
    app = typer.Typer()
    app.callback()(lambda: None)  # with one command only, typer would make it the application itself
    command.register(app)
    runner = CliRunner()
    image = workshop.home / "image"
    stale = image / ".corrupt-x"
    stale.mkdir(parents=True)
    done = runner.invoke(app, ["build", "--arch", "90a,80", "--cache-dir", str(image), "--clean-stale"])
    assert done.exit_code == 0, done.output
    (key,) = workshop.entries(image)
    for expected in (key, "built", "80, 90a", "seconds", "removed 1 stale"):
        assert expected in done.output
    assert not stale.exists()
    again = runner.invoke(app, ["build", "--arch", "80", "--arch", "90a", "--cache-dir", str(image)])
    assert "cached" in again.output
    refused = runner.invoke(app, ["build", "--arch", "75"])
    assert isinstance(refused.exception, CliError)
    assert refused.exception.code == 2
    (workshop.sources / "answer.cuh").write_text("#define ANSWER nonsense\n")
    failed = runner.invoke(app, ["build", "--arch", "80"])
    assert failed.exit_code == 1
    assert "first error" in failed.output
