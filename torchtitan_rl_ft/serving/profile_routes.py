"""The route by which rollout has the engines profiled (docs/architecture.md)."""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

from torchtitan_rl_ft.rpc.server import RequestError, json_body
from torchtitan_rl_ft.serving.profiles import EngineProfiles


class ProfileRoutes:
    def __init__(self, profiles: EngineProfiles) -> None:
        self._profiles = profiles

    def table(self) -> list[web.RouteDef]:
        return [web.post("/v1/profile", self.profile)]

    async def profile(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        action, folder = body.get("action"), body.get("folder")
        if action not in ("start", "stop") or not isinstance(folder, str) or not folder:
            raise RequestError(400, 'needed: "action", start or stop, and "folder"')
        act = self._profiles.start if action == "start" else self._profiles.stop
        return web.json_response({"slots": await act(Path(folder))})
