"""Pages in a real Chromium: `PageSession` is one page, `WebApp` is what it talks to, `sites/` are our own apps."""

from turnwise.envs.browser.gateway import FolderApp, UploadedFile, WebApp, WebRequest, WebResponse
from turnwise.envs.browser.page import PageOptions, PageSession

__all__ = [
    "FolderApp",
    "PageOptions",
    "PageSession",
    "UploadedFile",
    "WebApp",
    "WebRequest",
    "WebResponse",
]
