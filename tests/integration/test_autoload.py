# SPDX-License-Identifier: Apache-2.0
"""The import hook, in fresh interpreters: most tests import a made-up `deepspeed` of a few lines, two the real one."""

import os
import subprocess
import sys
import textwrap
from importlib.metadata import entry_points
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

ENGINE_SOURCE = """
class DeepSpeedEngine:
    def __init__(self, args, model, config=None, config_class=None):
        self._config = config_class or Config(config or {})
        self.sources = self._configure_expert_parallel(model)
        self._configure_distributed_model(model)

    def _configure_distributed_model(self, model):
        self.model = model

    def _configure_expert_parallel(self, model):
        return f"sources of {model}"

class Config:
    def __init__(self, params):
        self._param_dict = params
"""
OTHER_ENGINE_SOURCE = ENGINE_SOURCE.replace("_configure_expert_parallel", "_configure_autoep")

INTEGRATION = """
calls = []
def configure_distributed_model(original, engine, *args):
    calls.append(("model", *args))
    original(engine, *args)
def configure_expert_parallel(original, engine, *args):
    calls.append(("experts", *args))
    return original(engine, *args)
"""


@pytest.fixture
def run(tmp_path):
    """run(code, source=...): stdout and stderr of `code`, with a made-up deepspeed and integration.start."""
    engine_path = tmp_path / "deepspeed" / "runtime" / "engine.py"
    engine_path.parent.mkdir(parents=True)
    (tmp_path / "deepspeed" / "__init__.py").write_text("")
    (tmp_path / "deepspeed" / "runtime" / "__init__.py").write_text("")

    def run_code(code, *, source=ENGINE_SOURCE):
        engine_path.write_text(source)
        prologue = f"""
            import sys, types
            start = types.ModuleType("ds_hybridep.deepspeed.start")
            exec({INTEGRATION!r}, start.__dict__)
            integration = types.ModuleType("ds_hybridep.deepspeed")
            integration.start = start
            sys.modules |= {{"ds_hybridep.deepspeed": integration, "ds_hybridep.deepspeed.start": start}}
            from ds_hybridep import _autoload
            """
        program = textwrap.dedent(prologue) + textwrap.dedent(code)
        return run_program(program, PYTHONPATH=os.pathsep.join([str(tmp_path), str(REPOSITORY)]))

    return run_code


def run_program(program, cwd=REPOSITORY, **environment):
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert result.returncode == 0, result.stderr
    return result


def package_in(folder):
    """`folder` with nothing but the package: DeepSpeed would import the op_builder of a checkout as its own."""
    (folder / "ds_hybridep").symlink_to(REPOSITORY / "ds_hybridep")
    return str(folder)


def test_install_loads_nothing_and_is_idempotent():
    program = """
import sys
before = set(sys.modules)
from ds_hybridep._autoload import install
install(); num_finders = len(sys.meta_path); install(); install()
assert len(sys.meta_path) == num_finders
print(*{name.split(".")[0] for name in set(sys.modules) - before})
"""
    assert set(run_program(program).stdout.split()) <= {"ds_hybridep", *sys.stdlib_module_names}


JOINS = """
for params in ({}, {"hybridep": None}, {"hybridep": {"enabled": False}}):
    assert module.DeepSpeedEngine(None, "model", params).sources == "sources of model"
assert start.calls == []
engine = module.DeepSpeedEngine(None, "model", {"hybridep": {}})
assert (engine.model, engine.sources) == ("model", "sources of model")
assert start.calls == [("experts", "model"), ("model", "model")]
"""


def test_an_engine_with_the_block_joins(run):
    assert run("_autoload.install()\nimport deepspeed.runtime.engine as module" + JOINS).stderr == ""


def test_a_key_that_looks_like_the_block_is_told_of_on_rank_0(run):
    code = """
    _autoload.install()
    import deepspeed.runtime.engine as module
    others = {"hybrid_engine": {}, "hybrid": 1, "zero_optimization": {}, 3: 4}
    similar = "hybridEP", "hybrid_ep", "HybridEP", "hybrid-ep", "hybridep_config", "hybirdep", "hybrid_expert_parallel"
    for key in similar:
        module.DeepSpeedEngine(None, "model", {**others, key: {}})
    module.DeepSpeedEngine(None, "model", others)
    module.DeepSpeedEngine(None, "model", {"hybrid_ep": {}, "hybridep": {"enabled": False}})
    module.DeepSpeedEngine.global_rank = 1
    module.DeepSpeedEngine(None, "model", {"hybrid_ep": {}})
    assert start.calls == []
    """
    lines = run(code).stderr.splitlines()
    assert len(lines) == 7
    assert lines[0] == (
        'ds_config has a key "hybridEP", which has no effect; if it is meant for ds_hybridep, its name is "hybridep"'
    )
    assert all('its name is "hybridep"' in line for line in lines)


def test_a_loader_that_takes_no_attributes_is_told_of_and_the_import_goes_on(run):
    code = """
    import importlib.machinery

    class Loader(importlib.machinery.SourceFileLoader):
        __slots__ = ()

        def __setattr__(self, name, value):
            if name == "exec_module":
                raise AttributeError("takes no attributes")
            super().__setattr__(name, value)

    _autoload._patch_after(Loader("deepspeed.runtime.engine", "engine.py"))
    """
    assert "takes no attributes" in run(code).stderr


def test_module_keeps_its_own_loader(run):
    code = """
    import importlib, importlib.machinery, importlib.util, inspect
    _autoload.install()
    assert importlib.util.find_spec("deepspeed.runtime.engine").loader.is_package("deepspeed.runtime.engine") is False
    import deepspeed.runtime.engine as module
    for loader in (module.__loader__, module.__spec__.loader):
        assert type(loader) is importlib.machinery.SourceFileLoader
    assert "class DeepSpeedEngine" in inspect.getsource(module)
    importlib.reload(module)
    module.DeepSpeedEngine(None, "model", {"hybridep": {}})
    assert len(start.calls) == 2
    """
    run(code)


def test_an_engine_class_imported_before_install_joins_too(run):
    assert run("import deepspeed.runtime.engine as module\n_autoload.install()" + JOINS).stderr == ""


@pytest.mark.parametrize("first", ["_autoload.install()", "import deepspeed.runtime.engine"])
def test_an_engine_that_does_not_fit_is_told_of_once_and_refused_only_with_the_block(run, first):
    code = f"""
    {first}
    _autoload.install()
    from deepspeed.runtime.engine import Config, DeepSpeedEngine
    for params in ({{}}, {{"hybridep": None}}, {{"hybridep": {{"enabled": False}}}}):
        assert DeepSpeedEngine(None, "model", config_class=Config(params)).model == "model"
        assert DeepSpeedEngine(None, "model", params).model == "model"
    for params in ({{"hybridep": {{}}}}, {{"hybridep": "typo"}}, {{"hybridep": {{"enabled": True}}}}):
        for arguments in ((None, "model", None, Config(params)), (None, "model", params)):
            try:
                DeepSpeedEngine(*arguments)
            except RuntimeError as error:
                assert "DeepSpeedEngine has no _configure_expert_parallel" in str(error)
                assert '"hybridep"' in str(error)
                assert isinstance(error.__cause__, AttributeError)
            else:
                raise AssertionError(params)
    """
    stderr = run(code, source=OTHER_ENGINE_SOURCE).stderr
    assert stderr.count("not active") == 1
    assert "DeepSpeedEngine has no _configure_expert_parallel" in stderr


def test_install_never_raises(run):
    code = """
    sys.modules["deepspeed.runtime.engine"] = types.ModuleType("half_imported")  # no DeepSpeedEngine in it
    _autoload.install()
    """
    assert "not active" in run(code).stderr


def test_missing_deepspeed_is_the_usual_error(run):
    code = """
    _autoload.install()
    import shutil, deepspeed.runtime, os
    os.remove(os.path.join(deepspeed.runtime.__path__[0], "engine.py"))
    try:
        import deepspeed.runtime.engine
    except ModuleNotFoundError as error:
        print(error)
    """
    assert run(code).stdout == "No module named 'deepspeed.runtime.engine'\n"


@pytest.mark.core
def test_a_process_without_the_block_loads_nothing_but_the_hook(tmp_path):
    program = """
import sys, torch
print(*[type(finder).__module__ for finder in sys.meta_path])
from ds_hybridep._autoload import install
install()  # also where the package was not installed, and torch did not call it
import deepspeed
from deepspeed.runtime.engine import DeepSpeedEngine
print(DeepSpeedEngine._configure_distributed_model.__code__.co_filename)
print(*sorted(name for name in sys.modules if name.split(".")[0] == "ds_hybridep"))
"""
    result = run_program(program, cwd=tmp_path, PYTHONPATH=package_in(tmp_path), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    finders, *_, path, modules = result.stdout.splitlines()
    assert "ds_hybridep._autoload" not in finders.split()
    assert path == str(tmp_path / "ds_hybridep" / "_autoload.py")
    assert modules.split() == ["ds_hybridep", "ds_hybridep._autoload", "ds_hybridep.version"]
    assert "not active" not in result.stderr


@pytest.mark.slow
def test_classic_moe_works_where_modules_of_autoep_are_missing(tmp_path):
    """They are new in patch releases; DeepSpeed itself has imported what it has before they go."""
    program = """
import os, sys, torch, deepspeed
from deepspeed.moe.layer import MoE
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # is compiled else
import ds_hybridep
deepspeed.init_distributed("gloo", verbose=False, auto_mpi_discovery=False, rank=0, world_size=1,
                           init_method="file://" + os.path.abspath("store"))
layer = MoE(8, torch.nn.Linear(8, 8), num_experts=2, k=1)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
engine, *_ = deepspeed.initialize(model=layer, config=config)
for name in ("checkpoint.autoep_affine", "moe.ep_experts", "module_inject.auto_ep_layer", "module_inject.auto_ep"):
    sys.modules[f"deepspeed.{name}"] = None  # importing it raises ImportError
levels = [{"name": "all", "size": 1, "domain_size": 1}]
ds_hybridep.attach(engine, {"levels": levels, "advanced": {"kernels": "reference"}})
engine.backward(engine(torch.randn(4, 8))[0].sum())
print(ds_hybridep.stats(engine)["layers"][0]["calls"])
"""
    result = run_program(program, cwd=tmp_path, PYTHONPATH=package_in(tmp_path), LOCAL_RANK="0")
    assert result.stdout.split()[-1] == "1"


@pytest.mark.core
def test_entry_point_of_torch_names_install():
    """torch calls what this entry point names; the test needs the package installed, as `make test` does."""
    (entry_point,) = entry_points(group="torch.backends", name="ds_hybridep")
    assert entry_point.value == "ds_hybridep._autoload:install"
    program = """
import sys, torch
print(*[type(finder).__module__ for finder in sys.meta_path])
"""
    assert "ds_hybridep._autoload" in run_program(program, TORCH_DEVICE_BACKEND_AUTOLOAD="1").stdout.split()


WAITING = """
import os, sys, threading, types
import torch
from ds_hybridep import _autoload
from torch.utils.file_baton import FileBaton

_autoload._LOCK_NOTICE_S = 0.3  # half a minute otherwise
lock, is_held, has_deepspeed = sys.argv[1], *map(int, sys.argv[2:])
if has_deepspeed:
    sys.modules["deepspeed"] = types.ModuleType("deepspeed")  # its name is all that matters
builder = FileBaton(lock)
assert builder.try_acquire()
if not is_held:
    os.close(builder.fd)  # as where the process was killed
    builder.fd = None
threading.Timer(1.5, builder.release).start()
FileBaton(lock).wait()
print(os.path.exists(lock))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_held", "has_deepspeed", "says"),
    [(False, True, True), (True, True, False), (False, False, False)],
    ids=["interrupted", "under way", "without deepspeed"],
)
def test_a_start_that_waits_for_an_interrupted_build_says_so(tmp_path, is_held, has_deepspeed, says):
    lock = tmp_path / "lock"
    arguments = [str(lock), str(int(is_held)), str(int(has_deepspeed))]
    result = subprocess.run(
        [sys.executable, "-c", WAITING, *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=50
    )
    assert (result.returncode, result.stdout) == (0, "False\n"), result.stderr
    assert (str(lock) in result.stderr) == says
    assert ("an interrupted build" in result.stderr or "delete the file" in result.stderr) == says
    assert result.stderr.count("\n") == int(says)
