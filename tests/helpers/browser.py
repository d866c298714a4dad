"""A headless Chromium for tests of pages; what the page logs and asks for is kept."""

from __future__ import annotations

import shutil
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium_path() -> str:
    """Return the path of an installed Chromium, or an empty text."""
    return next((path for name in NAMES if (path := shutil.which(name))), "")


class Browser:
    """One browser, many pages; each has a context of its own, so nothing is remembered from one to the next."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.complaints: list[str] = []
        """Errors of scripts and of the console."""
        self.requests: list[str] = []

    def __enter__(self) -> Browser:
        from playwright.sync_api import sync_playwright

        self._playwright = sync_playwright().start()
        self._browser = self._playwright.chromium.launch(executable_path=self._path, args=["--no-sandbox"])
        return self

    def __exit__(self, *_: object) -> None:
        self._browser.close()
        self._playwright.stop()

    def page(self, *, width: int = 1280, height: int = 800, **how: Any) -> Any:
        """Open a new window."""
        context = self._browser.new_context(viewport={"width": width, "height": height}, **how)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("websocket", lambda socket: self.requests.append(socket.url))
        return page

    def close_pages(self) -> None:
        """Close all windows."""
        for context in self._browser.contexts:
            context.close()

    @staticmethod
    def settle(page: Any) -> None:
        """Waits until what has changed is drawn."""
        page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done())))")
