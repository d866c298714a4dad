"""Watching a model train: what is looked at, how it is reduced, and how it travels to those who look on."""

from pathlib import Path

__all__ = ["PAGE_FOLDER"]

PAGE_FOLDER = Path(__file__).parent / "page"
"""The files of the tracer's page, among them uPlot, with which other pages draw too."""
