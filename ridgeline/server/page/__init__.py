"""The page that a server shows at `/`: chat, live charts, requests, the verdict."""

from ridgeline.server.page.routes import page_routes

__all__ = ["page_routes"]
