"""The plug-ins load into an engine by PYTHONPATH alone, hook what the engines' own sources name, and never break them.

What imitates an engine here keeps to the calls that its sources make; the real thing is `make test-engines`.
"""

import ast
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eyas.formats.trace import ENGINE_SIDE, Trace, read_trace

PACKAGE = ENGINE_SIDE / "eyas_trace"
HIDDEN, ROWS = 6, 5
MODELS = """
import torch
from torch import nn

class LogitsProcessor(nn.Module):
    def forward(self, *args):
        return self.answer(*args)

class Fc(nn.Linear):
    pass

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = Fc(18, 6, bias=False)

class Target(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.aux_hidden_state_layers = (2, 4, 5)
        self.model.layers_to_capture = [2, 4, 5]
        self.logits_processor = LogitsProcessor()

def states(rows):
    return [torch.arange(float(rows * 6)).reshape(rows, 6) + 100 * tap for tap in range(3)]
"""
VLLM = """
import sys, types, torch
sys.modules["vllm"] = vllm = types.ModuleType("vllm"); vllm.__version__ = "0.32.0"
context = types.ModuleType("vllm.forward_context"); sys.modules["vllm.forward_context"] = context
context.now = None
context.is_forward_context_available = lambda: context.now is not None
context.get_forward_context = lambda: context.now
base = types.ModuleType("vllm.model_executor.model_loader.base_loader")
for name in ("vllm.model_executor", "vllm.model_executor.model_loader"):
    sys.modules[name] = types.ModuleType(name)
sys.modules[base.__name__] = base

class BaseModelLoader:
    def load_model(self, vllm_config, model_config, prefix=""):
        return model_config()

base.BaseModelLoader = BaseModelLoader

class VllmTarget(Target):
    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        taps = states(len(input_ids))
        return taps[0], taps

class Eagle3LlamaForCausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Inner()
        self.logits_processor = LogitsProcessor()
        self.logits_processor.answer = lambda head, hidden: hidden @ torch.ones(6, 9)
    def combine_hidden_states(self, taps):
        return self.model.fc(taps)
    def forward(self, input_ids, positions, hidden_states, inputs_embeds=None):
        return hidden_states + 1, hidden_states
    def compute_logits(self, hidden):
        return self.logits_processor(None, hidden)

from importlib.metadata import entry_points
for point in entry_points(group="vllm.general_plugins"):
    point.load()(); point.load()()
load = BaseModelLoader().load_model
target = load(vllm_config=None, model_config=VllmTarget)
draft = load(vllm_config=None, model_config=Eagle3LlamaForCausalLM)

def attention(actual):
    return types.SimpleNamespace(attn_metadata={"layer": types.SimpleNamespace(num_actual_tokens=actual)})

def round(ids, start, padding=0):
    rows = len(ids)
    context.now = attention(rows)
    padded = torch.tensor([*ids, *[0] * padding])
    positions = torch.arange(start, start + rows + padding)
    _, taps = target(input_ids=padded, positions=positions, intermediate_tensors=None, inputs_embeds=None)
    context.now = None
    fused = draft.combine_hidden_states(torch.cat([tap[:rows] for tap in taps], dim=-1))
    context.now = attention(rows)
    hidden, fed = draft(input_ids=padded[1:rows + 1], positions=positions[:rows], hidden_states=fused)
    context.now = None
    draft.compute_logits(hidden[-1:])

context.now = types.SimpleNamespace(attn_metadata=None)  # a profiling run
target(input_ids=torch.zeros(64).long(), positions=torch.zeros(64).long())
draft(torch.zeros(64).long(), torch.zeros(64).long(), torch.zeros(64, 6))
round([7, 8, 9, 10, 11], 0, padding=3)
round([12, 13], 5)
round([14], 7)
"""


def run(tmp_path: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in an interpreter that has the plug-ins on its path, and no Eyas."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EYAS_TRACE")}
    return subprocess.run(
        [sys.executable, "-"],
        input=code,
        cwd=tmp_path,
        env={**kept, "PYTHONPATH": str(ENGINE_SIDE), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def traced(tmp_path: Path, code: str, **environment: str) -> Trace:
    out = tmp_path / "out"
    done = run(tmp_path, code, EYAS_TRACE="1", EYAS_TRACE_OUT=str(out), EYAS_TRACE_TENSORS="1", **environment)
    assert done.returncode == 0, done.stderr
    return read_trace(out)


def tensor(trace: Trace, stage: str, number: int = 0) -> torch.Tensor:
    record = [one for one in trace.records if one.stage == stage][number]
    assert record.tensor is not None
    return load_file(trace.folder / record.tensor)["x"]


def test_it_imports_the_standard_library_torch_and_safetensors_only() -> None:
    allowed = {*sys.stdlib_module_names, "torch", "safetensors"}
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed, path
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                assert node.module is not None and node.module.split(".")[0] in allowed, path


def test_both_engines_find_it_by_its_entry_points_and_off_it_imports_no_torch(tmp_path: Path) -> None:
    code = """
    import sys
    from importlib.metadata import entry_points
    for group in ("vllm.general_plugins", "sglang.srt.plugins"):
        points = [point for point in entry_points(group=group) if point.name == "eyas_trace"]
        assert len(points) == 1, group
        assert points[0].load()() is None
    assert not {"eyas", "vllm", "sglang"} & set(sys.modules)
    """
    done = run(tmp_path, textwrap.dedent(code))
    assert done.returncode == 0, done.stderr


def test_an_engine_without_the_names_is_told_so_and_goes_on(tmp_path: Path) -> None:
    code = """
    import logging
    logging.basicConfig()
    from importlib.metadata import entry_points
    for group in ("vllm.general_plugins", "sglang.srt.plugins"):
        for point in entry_points(group=group):
            point.load()()
    """
    done = run(tmp_path, textwrap.dedent(code), EYAS_TRACE="1")
    assert done.returncode == 0
    assert done.stderr.count("eyas_trace: no trace:") == 2
    assert "BaseModelLoader" in done.stderr and "model_runner" in done.stderr


def test_vllm_taps_fc_and_draft_are_recorded_without_padding_or_warm_up(tmp_path: Path) -> None:
    trace = traced(tmp_path, MODELS + VLLM, EYAS_TRACE_CALLS="2")
    assert (trace.header.source, trace.header.version, trace.header.boundaries) == ("vllm", "0.32.0", (2, 4, 5))
    one = ["tap", "tap", "tap", "taps", "fc", "layer", "logits"]
    assert [record.stage for record in trace.records] == one * 2
    first, fed, layer = trace.records[0], trace.records[3], trace.records[5]
    assert first.ids == (7, 8, 9, 10, 11) == fed.ids and first.positions == (0, 1, 2, 3, 4)
    assert [record.boundary for record in trace.records[:3]] == [2, 4, 5]
    assert torch.equal(tensor(trace, "tap", 1), torch.arange(30.0).reshape(5, 6) + 100)
    assert torch.equal(tensor(trace, "taps"), torch.cat([tensor(trace, "tap", tap) for tap in range(3)], dim=-1))
    assert torch.equal(tensor(trace, "layer"), tensor(trace, "fc"))
    assert layer.ids == (8, 9, 10, 11, 0) and tensor(trace, "logits").shape == (1, 9)
    assert [record.step for record in trace.records if record.stage == "logits"] == [0, 0]


def test_a_trace_that_fails_leaves_the_engine_running(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = run(tmp_path, MODELS + VLLM, EYAS_TRACE="1", EYAS_TRACE_OUT=str(blocked / "out"))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the trace ends here") == 1


def test_the_worker_extension_starts_a_trace_in_a_running_engine(tmp_path: Path) -> None:
    late = VLLM.split("from importlib.metadata")[0] + VLLM[VLLM.index("target = load") :].replace(
        "target = load(vllm_config=None, model_config=VllmTarget)\n"
        "draft = load(vllm_config=None, model_config=Eagle3LlamaForCausalLM)",
        "target, draft = VllmTarget(), Eagle3LlamaForCausalLM()\n"
        "from eyas_trace.vllm_plugin import TraceExtension\n"
        "class Worker(TraceExtension):\n"
        "    model_runner = types.SimpleNamespace(\n"
        "        get_model=lambda: target, drafter=types.SimpleNamespace(model=draft))\n"
        "assert Worker().eyas_trace_start() == ['VllmTarget', 'Eagle3LlamaForCausalLM']",
    )
    assert len(traced(tmp_path, MODELS + late).of("fc")) == 3


# SGLang, against the sources in its wheel ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel() -> zipfile.ZipFile:
    """EYAS_WHEELS names a folder with sglang's wheel (`pip download --no-deps sglang==0.5.23`)."""
    folder = os.environ.get("EYAS_WHEELS", "")
    found = sorted(Path(folder).glob("sglang-0.5.23-*.whl")) if folder else []
    if not found:
        pytest.skip("no sglang 0.5.23 wheel: EYAS_WHEELS names the folder that holds it")
    return zipfile.ZipFile(found[0])


def source(wheel: zipfile.ZipFile, path: str) -> ast.Module:
    return ast.parse(wheel.read(f"sglang/srt/{path}").decode())


def method(tree: ast.Module, owner: str, name: str) -> ast.FunctionDef:
    kind = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)
    return next(node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == name)


def test_sglang_has_the_names_that_are_hooked(wheel: zipfile.ZipFile) -> None:
    runner = source(wheel, "model_executor/model_runner.py")
    assert "self.model = " in ast.unparse(method(runner, "ModelRunner", "load_model"))
    assert method(runner, "ModelRunner", "forward")
    processor = method(source(wheel, "layers/logits_processor.py"), "LogitsProcessor", "forward")
    names = [argument.arg for argument in processor.args.args]
    assert names[1:6] == ["input_ids", "hidden_states", "lm_head", "logits_metadata", "aux_hidden_states"]
    draft = source(wheel, "models/llama_eagle3.py")
    made = ast.unparse(method(draft, "LlamaForCausalLMEagle3", "__init__"))
    assert "self.model = LlamaModel(" in made and "self.logits_processor = LogitsProcessor(" in made
    inner = method(draft, "LlamaModel", "forward")
    assert [argument.arg for argument in inner.args.args][1:3] == ["input_ids", "positions"]
    assert "self.fc(hidden_states)" in ast.unparse(inner)
    mla = source(wheel, "models/kimi_k25_eagle3.py")
    assert "self.fc(hidden_states)" in ast.unparse(mla) and "self.model = " in ast.unparse(mla)
    assert '"--disable-cuda-graph"' in wheel.read("sglang/srt/server_args.py").decode()
    for family in ("llama", "qwen3", "deepseek_v2", "gpt_oss"):
        text = wheel.read(f"sglang/srt/models/{family}.py").decode()
        assert "self.logits_processor(" in text and "aux_hidden_states" in text, family
        assert "layers_to_capture" in text, family


def constants(module: str) -> dict[str, str | tuple[str, ...]]:
    """What a plug-in spells: its module's constants, without importing it."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    pairs = [(node.targets[0], node.value) for node in tree.body if isinstance(node, ast.Assign)]
    named = [(name.id, value) for name, value in pairs if isinstance(name, ast.Name)]
    return {name: ast.literal_eval(value) for name, value in named if isinstance(value, ast.Constant | ast.Tuple)}


def test_what_the_plug_in_spells_is_in_sglang(wheel: zipfile.ZipFile) -> None:
    """Every module, class, argument and attribute by which it hooks: a rename there fails here."""
    spelled = constants("sglang_plugin")
    runner, registry = (
        f"{spelled[name]}".removeprefix("sglang.srt.").replace(".", "/") for name in ("RUNNER", "REGISTRY")
    )
    for name in ("load_model", "forward"):
        assert method(source(wheel, f"{runner}.py"), "ModelRunner", name)
    hooks = source(wheel, f"{registry}.py")
    registered = [argument.arg for argument in method(hooks, "HookRegistry", "register").args.args]
    assert registered[:4] == ["cls", "target", "hook", "hook_type"] and method(hooks, "HookRegistry", "apply_hooks")
    kinds = next(node for node in hooks.body if isinstance(node, ast.ClassDef) and node.name == "HookType")
    assert {"AFTER", "AROUND"} <= {target.id for node in kinds.body if isinstance(node, ast.Assign)
                                   for target in node.targets if isinstance(target, ast.Name)}  # fmt: skip
    plugins = ast.unparse(source(wheel, "plugins/__init__.py"))
    assert "'sglang.srt.plugins'" in plugins and "HookRegistry.apply_hooks()" in plugins
    for loads in ("managers/scheduler.py", "entrypoints/engine.py"):
        assert "load_plugins()" in ast.unparse(source(wheel, loads))
    processor = method(source(wheel, "layers/logits_processor.py"), f"{spelled['PROCESSOR']}", "forward")
    assert tuple(argument.arg for argument in processor.args.args[1:6]) == spelled["ARGUMENTS"]
    assert "next_token_logits:" in ast.unparse(source(wheel, "layers/logits_processor.py"))
    assert "positions:" in ast.unparse(source(wheel, "model_executor/forward_batch_info.py"))
    assert "self._buffer" in ast.unparse(source(wheel, "layers/aux_hidden_states.py"))
    fields = wheel.read("sglang/srt/arg_groups/field_order.py").decode()
    for flag in ("disable_radix_cache", "skip_server_warmup", "forward_hooks"):
        assert f'"{flag}"' in fields, flag


SGLANG = """
import importlib.util, sys, types, zipfile, torch
archive = zipfile.ZipFile(WHEEL)

def load(name, path):
    module = types.ModuleType(name); sys.modules[name] = module
    exec(compile(archive.read(path).decode(), path, "exec"), module.__dict__)
    parent, _, own = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], own, module)
    return module

for name in ("sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.model_executor",
             "sglang.srt.model_executor.model_runner"):
    sys.modules[name] = types.ModuleType(name)
    parent, _, own = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], own, sys.modules[name])
sys.modules["sglang"].__version__ = "0.5.23"
registry = load("sglang.srt.plugins.hook_registry", "sglang/srt/plugins/hook_registry.py")
manager = load("sglang.srt.model_executor.hook_manager", "sglang/srt/model_executor/hook_manager.py")

class SglangTarget(Target):
    def __init__(self):
        super().__init__()
        self.logits_processor.answer = lambda *args: types.SimpleNamespace(next_token_logits=torch.zeros(1, 20))
    def forward(self, input_ids, positions, batch):
        self.taps = states(len(input_ids))
        return self.logits_processor(input_ids, self.taps[0], None, batch, self.taps)

class DraftModel(Inner):
    def forward(self, input_ids, positions, batch):
        hidden = batch.hidden_states
        hidden = self.fc(hidden) if hidden.shape[-1] != 6 else hidden
        return hidden + 1, [hidden]

class LlamaForCausalLMEagle3(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = DraftModel()
        self.logits_processor = LogitsProcessor()
        self.logits_processor.answer = lambda ids, hidden, *rest: types.SimpleNamespace(
            next_token_logits=hidden[-1:] @ torch.ones(6, 9))
    def forward(self, input_ids, positions, batch):
        hidden, aux = self.model(input_ids, positions, batch)
        return self.logits_processor(input_ids, hidden, None, batch, aux)

class ModelRunner:
    def __init__(self, kind):
        self.kind = kind
        self.load_model()
    def load_model(self):
        self.model = self.kind()
    def forward(self, batch):
        return self.model.forward(batch.input_ids, batch.positions, batch)

sys.modules["sglang.srt.model_executor.model_runner"].ModelRunner = ModelRunner

def batch(ids, start, **more):
    return types.SimpleNamespace(input_ids=torch.tensor(ids), positions=torch.arange(start, start + len(ids)), **more)

def serve(target, draft):
    target.model.forward(torch.zeros(64).long(), torch.zeros(64).long(), batch([0] * 64, 0))  # graph warm-up
    idle = batch([0] * 4, 0, hidden_states=torch.zeros(4, 18))
    draft.model.forward(idle.input_ids, idle.positions, idle)
    target.forward(batch([7, 8, 9, 10, 11], 0))
    wide = torch.cat(target.model.taps, dim=-1)
    draft.forward(batch([8, 9, 10, 11, 12], 0, hidden_states=wide))
    draft.forward(batch([13], 5, hidden_states=torch.ones(1, 6)))
"""


def test_sglang_applies_the_plug_in_by_its_own_registry(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    code = f"WHEEL = {wheel.filename!r}\n{MODELS}{SGLANG}" + textwrap.dedent("""
    from importlib.metadata import entry_points
    for point in entry_points(group="sglang.srt.plugins"):
        point.load()()
    registry.HookRegistry.apply_hooks()
    serve(ModelRunner(SglangTarget), ModelRunner(LlamaForCausalLMEagle3))
    """)
    trace = traced(tmp_path, code)
    assert (trace.header.source, trace.header.version, trace.header.boundaries) == ("sglang", "0.5.23", (2, 4, 5))
    wanted = ["tap", "tap", "tap", "taps", "fc", "layer", "logits", "layer", "logits"]
    assert [record.stage for record in trace.records] == wanted
    assert trace.records[0].ids == (7, 8, 9, 10, 11) == trace.records[3].ids
    assert [record.step for record in trace.records if record.stage == "layer"] == [0, 1]
    assert torch.equal(tensor(trace, "layer"), tensor(trace, "fc"))
    assert trace.records[5].ids == (8, 9, 10, 11, 12) and trace.records[7].positions == (5,)


def test_sglang_attaches_the_factory_by_its_own_hook_manager(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    code = f"WHEEL = {wheel.filename!r}\n{MODELS}{SGLANG}" + textwrap.dedent("""
    target, draft = ModelRunner(SglangTarget), ModelRunner(LlamaForCausalLMEagle3)
    factory = "eyas_trace.sglang_plugin:forward_hook"
    specs = [{"target_modules": ["*fc"], "hook_factory": factory, "config": {"stage": "fc"}},
             {"target_modules": ["*logits_processor"], "hook_factory": factory, "config": {"stage": "logits"}}]
    for runner in (target, draft):
        manager.register_forward_hooks(runner.model, specs)
    target.model.forward = type(target.model).forward.__get__(target.model)
    target.forward(batch([7, 8, 9, 10, 11], 0))
    draft.forward(batch([8, 9, 10, 11, 12], 0, hidden_states=torch.cat(target.model.taps, dim=-1)))
    """)
    trace = traced(tmp_path, code)
    assert [record.stage for record in trace.records] == ["tap", "tap", "tap", "taps", "fc", "logits"]
    assert trace.records[0].ids == (7, 8, 9, 10, 11) and trace.header.boundaries is None
