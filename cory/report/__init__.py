"""How a run, an evaluation or a comparison is shown."""

from cory.report.page import NAME, write_evaluation_report, write_run_report

__all__ = ["NAME", "write_evaluation_report", "write_run_report"]
