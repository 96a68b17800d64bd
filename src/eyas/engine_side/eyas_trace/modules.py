"""Where to hook a model that an engine built: by module names and class names that hold over architectures."""

from collections.abc import Callable
from typing import Any

import torch

from .record import Recorder, logger, safely


def is_draft(model: torch.nn.Module) -> bool:
    """EAGLE drafts say so in their class's name, in both engines."""
    return "eagle" in type(model).__name__.lower()


def named_last(model: torch.nn.Module, name: str) -> torch.nn.Module | None:
    """The first module whose own name is `name`, wherever it lies."""
    return next((module for path, module in model.named_modules() if path.rpartition(".")[2] == name), None)


def of_class(model: torch.nn.Module, name: str) -> torch.nn.Module | None:
    """The first module of a class called `name`."""
    return next((module for module in model.modules() if type(module).__name__ == name), None)


def layer_list(model: torch.nn.Module, attribute: str) -> tuple[int, ...] | None:
    """A list of layer numbers that some module of the model keeps under `attribute`."""
    for module in model.modules():
        found = module.__dict__.get(attribute)
        if isinstance(found, list | tuple) and found and all(isinstance(one, int) for one in found):
            return tuple(sorted(set(found)))
    return None


def hook(recorder: Recorder, module: torch.nn.Module | None, what: str, after: Callable[..., None]) -> bool:
    """A forward hook with keyword arguments; says so in the log where there is no such module."""
    if module is None:
        logger.warning("eyas_trace: no %s in this model: that stage is left out", what)
        return False
    handle = module.register_forward_hook(safely(recorder, after), with_kwargs=True)
    recorder.removers.append(handle.remove)
    return True


def hook_fc(recorder: Recorder, draft: torch.nn.Module) -> bool:
    """The draft's fc: what it is given and what it gives."""

    def after(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if recorder.recording:
            recorder.taps(args[0])
            recorder.fc(tensor_of(output))

    return hook(recorder, named_last(draft, "fc"), "fc", after)


def tensor_of(output: Any) -> torch.Tensor:
    """A module's output, or the first of several."""
    return output[0] if isinstance(output, list | tuple) else output


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str) -> Any:
    """An argument given by name or by place; None where it is not."""
    return kwargs[name] if name in kwargs else args[place] if place < len(args) else None
