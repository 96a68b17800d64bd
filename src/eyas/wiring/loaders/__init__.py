"""What SGLang and vLLM, release by release, would do with a draft, without starting them. No torch."""

from eyas.wiring.loaders.case import TargetFacts
from eyas.wiring.loaders.report import LoaderReport, draft_folder, loader_report, read_target

__all__ = ["LoaderReport", "TargetFacts", "draft_folder", "loader_report", "read_target"]
