"""The engines that are compared: where each one's interpreter is, and in which environment it runs at its best."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from eyas.formats.draft_config import DraftConfig

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONWARNINGS": "ignore"}
TCMALLOC = (
    "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4",
    "/usr/lib/aarch64-linux-gnu/libtcmalloc_minimal.so.4",
    "/usr/lib64/libtcmalloc_minimal.so.4",
)
NO_EAGLE3 = "transformers has no EAGLE-3: generate() knows draft models and prompt lookup only"


@dataclass(frozen=True)
class Shape:
    """What is drafted a round: nothing, a chain of `num_steps`, or a tree."""

    num_steps: int = 0
    topk: int = 1
    num_draft_tokens: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """`5` is a chain, `3x2x8` a tree: num_steps, topk, num_draft_tokens. Raises ValueError."""
        num_steps, *tree = (int(part) for part in text.split("x"))
        if len(tree) not in (0, 2):
            raise ValueError(f"{text}: a chain is one number, a tree three: num_steps x topk x num_draft_tokens")
        return cls(num_steps, *tree)

    def __str__(self) -> str:
        return str(self.num_steps) if self.topk == 1 else f"{self.num_steps}x{self.topk}x{self.num_draft_tokens}"


PLAIN = Shape()


@dataclass(frozen=True)
class Engine:
    """One peer, or Eyas."""

    name: str
    environment: str | None
    """The folder `make` makes for it in the project; None: it runs in Eyas's own."""
    made_by: str = ""
    trees: bool = False
    whole_config: bool = False
    """Whether it reads every option of a draft that Eyas exports; if not, only plain EAGLE-3 with three taps."""
    void: str | None = None
    """Why it has no EAGLE-3 at all."""

    @property
    def script(self) -> Path:
        return HERE / f"{self.name}_worker.py"

    @property
    def variable(self) -> str:
        """The environment variable that names another interpreter."""
        return f"EYAS_{self.name.upper()}_PYTHON"

    @property
    def python(self) -> Path:
        if self.environment is None:
            return Path(sys.executable)
        # not resolved: the link in a virtual environment's bin is what makes it one
        return Path(os.environ.get(self.variable) or PROJECT / self.environment / "bin" / "python").absolute()

    def missing(self) -> str | None:
        """What to type, where its interpreter is not there."""
        if self.python.is_file():
            return None
        return f"no {self.python}: {self.made_by}, or {self.variable}=PYTHON of an environment that has it"

    def cannot(self, config: DraftConfig) -> str | None:
        """Why its rows with this draft would be of another draft."""
        if self.void or self.whole_config:
            return self.void
        plain = config.block == "llama" and len(config.boundaries) == 3 and config.num_hidden_layers == 1
        options = [name for name in OPTIONS if getattr(config, name)]
        if plain and not options:
            return None
        words = ", ".join(options) or f"block {config.block}, {len(config.boundaries)} taps"
        return f"it reads plain EAGLE-3 drafts only, and this one has {words}"

    def variables(self, threads: int, cache: Path) -> dict[str, str]:
        """The environment its worker runs in; what it compiles is kept under `cache`."""
        inherited = {name: value for name, value in os.environ.items() if not dropped(name)}
        ours = ("EYAS_CACHE", "PYTHONPATH") if self.environment is None else ()
        own = {name: os.environ[name] for name in ours if name in os.environ}
        return inherited | own | OFFLINE | {"OMP_NUM_THREADS": str(threads)} | self._best(threads, cache)

    def _best(self, threads: int, cache: Path) -> dict[str, str]:
        if self.name != "vllm":
            return {}
        preload = [self.python.parents[1] / "lib" / "libiomp5.so", *(Path(place) for place in TCMALLOC)]
        cores = sorted(os.sched_getaffinity(0))[:threads]
        return {
            "LD_PRELOAD": ":".join(str(place) for place in preload if place.is_file()),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CACHE_ROOT": str(cache),
            # what 0.32 compiles ahead it does not load again ("no attribute 'finalize_loading'"): every start compiled
            "VLLM_USE_AOT_COMPILE": "0",
            # `auto` leaves a core of its own to the server, and so one thread to the forward where there are two
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),
        }


OPTIONS = ("fc_norm", "norm_output", "own_embedding", "attention_bias", "fc_bias", "sliding_window")
ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine("eyas", None, trees=True, whole_config=True),
        Engine("hf", None, void=NO_EAGLE3),
        Engine("vllm", ".venv-vllm", "make setup-engines", whole_config=True),
        Engine("openvino", ".venv-openvino", "make setup-bench-peers", trees=True),
        Engine("llamacpp", ".venv-llamacpp", "make setup-bench-peers"),
    )
}


def dropped(name: str) -> bool:
    """Settings of this process that are no engine's business."""
    return name.startswith("EYAS_") or name in ("PYTHONPATH", "OMP_NUM_THREADS", "LD_PRELOAD")
