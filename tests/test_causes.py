"""The table of causes: every row is met by a line of its own, look-alikes with opposite advice stay apart."""

import re
from pathlib import Path

import pytest

from eyas.launch import causes
from eyas.launch.causes import TABLE, find
from eyas.launch.known_flags import known_flags, nearest_flag

DOCS = Path(__file__).parents[1] / "docs" / "causes.md"

# code, engine, phase, line (written for this test in the words that `seen` of the row names)
EXAMPLES = [
    ("oom_graphs", "sglang", None, "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 2 GiB"),
    ("oom_graphs", "sglang", "graphs", "torch.OutOfMemoryError: CUDA out of memory."),
    (
        "oom_sampler",
        "vllm",
        "graphs",
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy",
    ),
    ("oom_graphs", "vllm", "graphs", "torch.OutOfMemoryError: CUDA out of memory."),
    (
        "oom_weights",
        "vllm",
        "weights",
        "Failed to load model - not enough GPU memory. Try lowering (original error: x)",
    ),
    ("oom_weights", "sglang", "weights", "torch.OutOfMemoryError: CUDA out of memory."),
    ("oom", "sglang", "ready", "torch.OutOfMemoryError: CUDA out of memory."),
    ("oom", "vllm", "ready", "torch.OutOfMemoryError: HIP out of memory."),
    ("kv_no_room", "sglang", None, "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."),
    ("kv_no_room", "vllm", None, "ValueError: No available memory for the cache blocks. Try increasing"),
    (
        "kv_too_small",
        "vllm",
        None,
        "ValueError: (5 GiB KV cache is needed, which is larger than the available KV cache memory (3 GiB). "
        "Based on the available memory, the estimated maximum model length is 20480. Try",
    ),
    ("kv_too_small", "vllm", None, "ValueError: 5 GiB KV cache is needed, larger than the available KV cache memory"),
    (
        "cpu_kv_no_room",
        "vllm",
        None,
        "ValueError: The worker already uses 9 GiB. To resolve: increase `--gpu-memory-utilization` to more than 0.62",
    ),
    ("cpu_kv_too_large", "vllm", None, "ValueError: Available memory on node 0 (12.5/64.0 GiB) on kv cache allocation"),
    ("gpu_held_weights", "vllm", None, "ValueError: Externally held weights on device cuda:0 (30/80 GiB) exceed the"),
    (
        "gpu_busy",
        "vllm",
        None,
        "ValueError: Free memory on device cuda:0 (3.2/80.0 GiB) on startup is less than desired",
    ),
    ("gpu_unbalanced", "sglang", None, "RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied"),
    ("host_oom", "sglang", None, "RuntimeError: Rank 3 scheduler died during initialization (exit code: -9). If"),
    ("host_oom", "vllm", None, "/bin/bash: line 1:  4242 Killed                  vllm serve /m"),
    ("shm_full", None, None, "Bus error (core dumped)"),
    ("disk_full", None, None, "OSError: [Errno 28] No space left on device"),
    ("too_many_files", None, None, "OSError: [Errno 24] Too many open files"),
    ("permission", None, None, "PermissionError: [Errno 13] Permission denied: '/cache/x'"),
    (
        "port_busy",
        "sglang",
        None,
        "ValueError: port_base at 30001 is not available in 30 seconds. port_base is used by",
    ),
    ("port_busy", "sglang", None, "Port is already in use. dist_init_port=30002 port_base=30003"),
    ("port_busy", None, None, "[Errno 98] error while attempting to bind on address ('0.0.0.0', 8000)"),
    ("port_busy", None, None, "OSError: [Errno 98] Address already in use"),
    ("port_busy", "llamacpp", None, "start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 8080"),
    ("nccl_timeout", None, None, "[rank2]:[E ProcessGroupNCCL.cpp:688] Watchdog caught collective operation timeout"),
    ("nccl_peer_gone", None, None, "RuntimeError: [0] Connection closed by remote peer 10.0.0.2"),
    ("nccl_error", None, None, "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO)"),
    (
        "rendezvous_timeout",
        None,
        None,
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients",
    ),
    ("watchdog", "sglang", None, "Scheduler watchdog timeout (self.watchdog_timeout=300.0, self.soft=False)"),
    ("warmup_proxy", "sglang", None, "AssertionError: res=<Response [502]>, res.text=''"),
    ("warmup_failed", "sglang", None, "Initialization failed. warmup error: Traceback (most recent call last):"),
    ("weights_not_ready", "sglang", None, "Weights are not ready after waiting 120 seconds. Consider"),
    ("ranks_silent", "vllm", None, "No available shared memory broadcast block found in 60 seconds. This"),
    (
        "health_failed",
        "sglang",
        None,
        "Health check failed. Server couldn't get a response from detokenizer for last 20",
    ),
    ("engine_not_installed", None, None, "/usr/bin/python3: No module named vllm"),
    (
        "kernels_not_loaded",
        "sglang",
        None,
        "ImportError: [sgl_kernel] CRITICAL: Could not load any common_ops library!",
    ),
    (
        "module_shadowed",
        None,
        None,
        "ImportError: cannot import name 'wraps' from partially initialized module 'functools' "
        "(most likely due to a circular import)",
    ),
    (
        "import_mismatch",
        None,
        None,
        "ImportError: cannot import name 'AutoVideo' from 'transformers.models' (/env/x.py)",
    ),
    ("module_missing", None, None, "ModuleNotFoundError: No module named 'flashinfer'"),
    ("package_renamed", None, None, "importlib.metadata.PackageNotFoundError: No package metadata was found for vllm"),
    ("python_version", None, None, "SyntaxError: invalid syntax"),
    ("library_missing", None, None, "ImportError: libcudart.so.12: cannot open shared object file: No such file"),
    ("library_mismatch", None, None, "ImportError: /env/_C.abi3.so: undefined symbol: _ZN3c10E"),
    (
        "gpu_too_new_or_old",
        None,
        None,
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    ),
    ("driver_too_old", None, None, "RuntimeError: The NVIDIA driver on your system is too old (found version 11040)."),
    (
        "too_few_gpus",
        "vllm",
        None,
        "Value error, World size (8) is larger than the number of available GPUs (4) in this",
    ),
    ("too_few_gpus", "sglang", None, "RuntimeError: CUDA error: invalid device ordinal"),
    ("no_gpu", None, None, "RuntimeError: No CUDA GPUs are available"),
    ("python_headers", None, None, "/tmp/x/main.c:4:10: fatal error: Python.h: No such file or directory"),
    ("no_compiler", None, None, "RuntimeError: Failed to find C compiler. Please specify via CC environment variable"),
    ("no_nvcc", None, None, "OSError: CUDA_HOME environment variable is not set. Please set it"),
    ("no_ninja", None, None, "RuntimeError: Ninja is required to load C++ extensions (pip install ninja to get it)"),
    ("compile_failed", None, None, "torch._inductor.exc.InductorError: CalledProcessError: Command '['/usr/bin/gcc'"),
    ("gpu_fault", None, None, "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
    ("wrong_flag", None, None, "vllm: error: unrecognized arguments: --disable-prefix-caching"),
    ("wrong_flag", None, None, "launch_server.py: error: argument --tp-size/--tp: invalid int value: 'two'"),
    ("wrong_flag", "llamacpp", None, "error: invalid argument: --ctx"),
    (
        "draft_path_not_a_model",
        "vllm",
        None,
        "Value error, Invalid repository ID or local directory specified: '/out/draft'.",
    ),
    (
        "no_config",
        None,
        None,
        "ValueError: Unrecognized model in /m. Should have a `model_type` key in its config.json.",
    ),
    (
        "unknown_arch",
        None,
        None,
        "ValueError: The checkpoint you are trying to load has model type `newarch` but Transformers does not "
        "recognize this architecture.",
    ),
    (
        "unknown_arch",
        None,
        None,
        "ValueError: Model architectures ['NewForCausalLM'] failed to be inspected. Please check",
    ),
    ("unknown_arch", None, None, "ValueError: Model architectures ['NewForCausalLM'] are not supported for now."),
    ("unknown_arch", "llamacpp", None, "llama_model_load: error loading model: unknown model architecture: 'new'"),
    ("gated_model", None, None, "OSError: You are trying to access a gated repo."),
    (
        "model_absent",
        None,
        None,
        "OSError: /models/x is not a local folder and is not a valid model identifier listed on",
    ),
    ("hub_unreachable", None, None, "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and"),
    ("no_weights", None, None, "RuntimeError: Cannot find any model weights with `/m`"),
    (
        "shard_corrupt",
        None,
        None,
        "safetensors_rust.SafetensorError: Error while deserializing header: header too large",
    ),
    ("shard_missing", None, None, "FileNotFoundError: No such file or directory: /m/model-00003-of-00004.safetensors"),
    ("draft_qk_norm", "vllm", None, "KeyError: 'layers.0.self_attn.q_norm.weight'"),
    ("tensor_unknown", None, None, "ValueError: There is no module or parameter named 'midlayer' in LlamaModel."),
    (
        "tensor_missing",
        None,
        None,
        "ValueError: Following weights were not initialized from checkpoint: {'model.fc.weight'}",
    ),
    ("draft_vocab_missing", None, None, "AttributeError: 'LlamaConfig' object has no attribute 'draft_vocab_size'"),
    ("draft_not_given", "sglang", None, "AttributeError: 'LlamaForCausalLM' object has no attribute 'set_embed'"),
    ("target_no_aux", None, None, "RuntimeError: Model does not support EAGLE3 interface"),
    ("aux_count", None, None, "RuntimeError: captured 2 of 3 aux hidden states"),
    ("wrong_width", None, None, "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x6144 and 12288x4096)"),
    ("wrong_width", "vllm", None, "AssertionError: Tried to load weights of size torch.Size([5, 5])to a parameter of"),
    (
        "draft_context",
        "sglang",
        None,
        "ValueError: Warning: Target model's context_length (40960) is greater than the derived context_length (2048).",
    ),
    (
        "context_too_long",
        "sglang",
        None,
        "ValueError: Warning: User-specified context_length (80000) is greater than the derived context_length (40960)",
    ),
    (
        "context_too_long",
        "vllm",
        None,
        "ValueError: User-specified max_model_len (80000) is greater than the derived max_model_len "
        "(max_position_embeddings=40960 or model_max_length=None in model's config.json).",
    ),
    (
        "quant_unsupported",
        "vllm",
        None,
        "ValueError: The quantization method fp8 is not supported for the current GPU. Minimum capability: 75. Current",
    ),
    (
        "quant_mismatch",
        None,
        None,
        "ValueError: Quantization method specified in the model config (fp8) does not match the quantization method",
    ),
    ("quant_unsupported", None, None, "ValueError: Unknown quantization method: q9. Must be one of"),
    (
        "heads_not_divisible",
        "vllm",
        None,
        "Value error, Total number of attention heads (40) must be divisible by tensor parallel size (3).",
    ),
    ("heads_not_divisible", "sglang", None, "AssertionError: 151936 is not divisible by 7"),
    ("remote_code", None, None, "ValueError: Please pass the argument `trust_remote_code=True` to allow custom code"),
    ("tokenizer", None, None, "ValueError: Couldn't instantiate the backend tokenizer from one of:"),
    (
        "spec_page_size",
        "sglang",
        None,
        "ValueError: speculative_eagle_topk > 1 with page_size > 1 is only supported on",
    ),
    ("spec_vocab", "sglang", None, "ValueError: --speculative-use-rejection-sampling requires the draft and target to"),
    ("spec_settings", None, None, "ValueError: Unsupported speculative method: 'eagle9'"),
    ("attention_backend", "vllm", None, "ValueError: No valid attention backend found for NVIDIA H200"),
    ("index_out_of_range", None, None, "RuntimeError: CUDA error: device-side assert triggered"),
    ("illegal_access", None, None, "RuntimeError: CUDA error: an illegal memory access was encountered"),
    ("interrupted", None, None, "KeyboardInterrupt"),
    ("terminated", None, None, "Terminated"),
    ("segfault", None, None, "Fatal Python error: Segmentation fault"),
    ("child_died", "sglang", None, "Received sigquit from a child process. It usually means the child failed."),
    ("child_died", "sglang", None, "Scheduler hit an exception: Traceback (most recent call last):"),
    ("child_died", "vllm", None, "RuntimeError: Engine core initialization failed. See root cause above."),
    ("child_died", None, None, "Application startup failed. Exiting."),
    ("child_died", "llamacpp", None, "main: exiting due to model loading error"),
]


@pytest.mark.parametrize(("code", "engine", "phase", "line"), EXAMPLES)
def test_each_row_is_met_by_its_own_words(code: str, engine: str | None, phase: str | None, line: str) -> None:
    found = find(line, engine, phase, raw=False)
    assert found is not None
    row, match = found
    assert row.code == code
    advice = row.advise(match)
    assert "{" not in advice.replace('{"', "")
    assert not re.search(r"(?:^|[\s:/])\?(?:\W|$)", advice), "a group of the pattern that the advice needs was not met"


def test_no_row_is_without_an_example_and_every_row_names_its_source() -> None:
    met = {id(found[0]) for _, engine, phase, line in EXAMPLES if (found := find(line, engine, phase, raw=False))}
    assert [row.code for row in TABLE if id(row) not in met] == []
    assert len({row.code for row in TABLE if row.kind != "end"}) >= 30
    assert all(row.seen and row.words for row in TABLE)


def test_opposite_advices_that_look_alike_are_kept_apart() -> None:
    def advice(engine: str, line: str, phase: str | None = None) -> str:
        found = find(line, engine, phase, raw=False)
        assert found is not None
        return found[0].advise(found[1])

    assert advice(
        "sglang", "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."
    ).startswith("raise --mem-fraction-static")
    assert advice("sglang", "torch.OutOfMemoryError: CUDA out of memory.", "graphs").startswith(
        "lower --mem-fraction-static"
    )
    assert advice("vllm", "ValueError: No available memory for the cache blocks.").startswith(
        "raise --gpu-memory-utilization"
    )
    assert advice("vllm", "ValueError: Free memory on device cuda:0 (3.2/80.0 GiB) on startup is less than").endswith(
        "--gpu-memory-utilization below 3.2/80.0"
    )
    assert advice("vllm", "ValueError: Externally held weights on device cuda:0 (1/2 GiB) exceed").startswith(
        "raise --gpu-memory-utilization"
    )
    assert "--max-model-len 20480" in advice(
        "vllm", "larger than the available KV cache memory. the estimated maximum model length is 20480. Try"
    )


@pytest.mark.parametrize(
    "line",
    [
        "Port 8000 is already in use, trying port 8001",  # both engines look for the next one
        "Address already in use. Retrying with a new port.",  # vllm 0.33 config/parallel.py:750
        "Scheduler watchdog timeout (self.watchdog_timeout=60.0, self.soft=True)",  # only reports
        "Receive: obj=GenerateReqInput(text='why do I see CUDA out of memory?')",  # a user's words
        "Received request cmpl-1: prompt: 'Segmentation fault'",
        "max_total_num_tokens=900000, chunked_prefill_size=8192, available_gpu_mem=12.60 GB",
        "ModuleNotFound",
    ],
)
def test_what_only_sounds_like_a_failure_is_none(line: str) -> None:
    assert find(line, None, None, raw=False) is None


@pytest.mark.parametrize("around", ["{}", "({})", "a_{}_b", "1{}2", "é{}é"])
def test_no_message_that_holds_a_word_of_the_table_is_taken_for_silent(around: str) -> None:
    assert [word for word in causes.SHAPES if causes._silent(around.format(word.decode()).encode())] == []
    assert causes._silent(b"an ordinary line of an engine at work")


def test_a_word_of_the_table_that_goes_on_is_taken_for_silent_only_if_it_is_short() -> None:
    assert [w for w in causes.SHAPES if len(causes._key(w)) == 5 and causes._silent(w + b"s ")] == []


def test_a_flag_of_the_other_engine_or_release_is_translated_and_a_typo_corrected() -> None:
    assert nearest_flag("vllm", "--disable-prefix-caching") == " (here: --no-enable-prefix-caching)"
    assert nearest_flag("vllm", "--mem-fraction-static") == " (here: --gpu-memory-utilization)"
    assert nearest_flag("sglang", "--gpu-memory-utilization") == " (here: --mem-fraction-static)"
    assert nearest_flag("sglang", "--speculative-num-step") == ' (did you mean "--speculative-num-steps"?)'
    assert nearest_flag("vllm", "--zzz") == ""
    assert nearest_flag("llamacpp", "--ctx") == ""
    for engine, renamed in (("vllm", "--no-enable-prefix-caching"), ("sglang", "--disable-radix-cache")):
        assert renamed in known_flags(engine)


def test_the_page_of_causes_says_what_the_table_says() -> None:
    page = DOCS.read_text(encoding="utf-8")
    for row in TABLE:
        if row.kind != "end":
            assert f"| `{row.code}` |" in page
            assert row.advice.replace("|", "\\|") in page, row.code
    assert causes.UNEXPLAINED in page
