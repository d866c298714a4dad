"""The tracer beside a run: its hub, recordings and page."""

from pathlib import Path

__all__ = ["PAGE_FOLDER"]

PAGE_FOLDER = Path(__file__).parent / "page"
"""The files of the tracer's page, among them uPlot, with which other pages draw too."""
