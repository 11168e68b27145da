# SPDX-License-Identifier: Apache-2.0
"""The import hook, in fresh interpreters: most tests import a made-up `deepspeed` of a few lines, two the real one."""

import json
import os
import subprocess
import sys
import textwrap
from importlib.metadata import entry_points
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

ENGINE_SOURCE = """
class DeepSpeedEngine:
    def __init__(self, args, model, config=None, config_class=None):
        self.model = model

class Config:
    def __init__(self, params):
        self._param_dict = params
"""

GOOD_PATCH = """
calls = []
def patch_deepspeed_engine(module):
    calls.append(module)
    plain_init = module.DeepSpeedEngine.__init__
    def __init__(self, *args, **kwargs):
        self.is_patched = True
        plain_init(self, *args, **kwargs)
    module.DeepSpeedEngine.__init__ = __init__
"""

BAD_PATCH = """
def patch_deepspeed_engine(module):
    raise LookupError("MOELayer has moved")
"""


@pytest.fixture
def run(tmp_path):
    """run(code, patch=...): stdout and stderr of `code`, with made-up deepspeed and integration.engine."""
    engine_path = tmp_path / "deepspeed" / "runtime" / "engine.py"
    engine_path.parent.mkdir(parents=True)
    engine_path.write_text(ENGINE_SOURCE)
    (tmp_path / "deepspeed" / "__init__.py").write_text("")
    (tmp_path / "deepspeed" / "runtime" / "__init__.py").write_text("")

    def run_code(code, *, patch=GOOD_PATCH):
        prologue = f"""
            import sys, types
            engine = types.ModuleType("ds_hybridep.integration.engine")
            exec({patch!r}, engine.__dict__)
            sys.modules["ds_hybridep.integration.engine"] = engine
            from ds_hybridep import _autoload
            """
        program = textwrap.dedent(prologue) + textwrap.dedent(code)
        return run_program(program, PYTHONPATH=os.pathsep.join([str(tmp_path), str(REPOSITORY)]))

    return run_code


def run_program(program, **environment):
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert result.returncode == 0, result.stderr
    return result


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


def test_engine_is_patched_when_it_is_imported(run):
    code = """
    _autoload.install()
    import deepspeed.runtime.engine as module
    assert engine.calls == [module]
    assert module.DeepSpeedEngine(None, "model").is_patched
    """
    assert run(code).stderr == ""


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
    assert engine.calls == [module, module]
    """
    run(code)


def test_engine_imported_before_install_is_patched_at_its_first_use(run):
    code = """
    import deepspeed.runtime.engine as module
    _autoload.install()
    assert engine.calls == []
    assert module.DeepSpeedEngine(None, "first").is_patched
    assert module.DeepSpeedEngine(None, "second").is_patched
    assert engine.calls == [module]
    """
    run(code)


@pytest.mark.parametrize("first", ["_autoload.install()", "import deepspeed.runtime.engine"])
def test_failed_patch_is_logged_once_and_refuses_only_configs_with_the_block(run, first):
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
                assert "LookupError: MOELayer has moved" in str(error)
                assert '"hybridep"' in str(error)
                assert isinstance(error.__cause__, LookupError)
            else:
                raise AssertionError(params)
    """
    stderr = run(code, patch=BAD_PATCH).stderr
    assert stderr.count("not active") == 1
    assert "MOELayer has moved" in stderr


def test_failing_import_of_our_own_engine_counts_as_a_failed_patch(run):
    code = """
    sys.modules["ds_hybridep.integration.engine"] = None  # importing it raises ImportError
    _autoload.install()
    from deepspeed.runtime.engine import Config, DeepSpeedEngine
    DeepSpeedEngine(None, "model")
    """
    assert "ds_hybridep.integration.engine" in run(code).stderr


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
def test_real_engine_is_patched_without_a_word():
    program = """
import torch
from ds_hybridep._autoload import install
install()  # also where the package was not installed, and torch did not call it
from deepspeed.runtime.engine import DeepSpeedEngine
print(DeepSpeedEngine._configure_distributed_model.__code__.co_filename)
"""
    result = run_program(program)
    assert result.stdout.split()[-1] == str(REPOSITORY / "ds_hybridep" / "_autoload.py")
    assert "not active" not in result.stderr


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
    assert "ds_hybridep._autoload" not in run_program(program, TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout.split()


def test_cost_of_the_hook_is_printed(capsys):
    """No bound is asserted, since other work on the machine would decide."""
    program = """
import json, time
import torch
start = time.perf_counter()
from ds_hybridep._autoload import install
loaded = time.perf_counter()
install()
end = time.perf_counter()
print(json.dumps({"load_ms": 1e3 * (loaded - start), "install_ms": 1e3 * (end - loaded)}))
"""
    costs = [json.loads(run_program(program, TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout) for _ in range(3)]
    with capsys.disabled():
        best = {name: min(cost[name] for cost in costs) for name in costs[0]}
        print(f"\nadded to import torch: load {best['load_ms']:.2f} ms, install {best['install_ms']:.3f} ms")
