"""What SGLang and vLLM, release by release, would do with a draft, without starting them. No torch."""

from eyas.wiring.loaders.case import TargetFacts
from eyas.wiring.loaders.report import LoaderReport, loader_report, read_target
from eyas.wiring.loaders.said import Said, said_against

__all__ = ["LoaderReport", "Said", "TargetFacts", "loader_report", "read_target", "said_against"]
