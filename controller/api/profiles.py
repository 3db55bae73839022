"""`/profiles`: tuned profiles over HTTP, to read.

Owns routes. Must not speak SQL, nor change which profile is active: that is done beside the server,
which reads settings only when it starts.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path
from pydantic import StringConstraints

from controller.api.errors import ApiError
from store.errors import StoreError
from store.profiles import ProfileStore

_Name = Annotated[str, StringConstraints(max_length=128, pattern=r"^[^\x00]*$")]


def profiles_router(store: ProfileStore) -> APIRouter:
    """Return the routes: the list without documents, the newest first, and one whole profile.

    Errors are OpenAI error JSON: 404 for an unknown name, 503 while the database cannot be read.
    """
    router = APIRouter(prefix="/profiles", tags=["profiles"])

    @router.get("")
    def profiles() -> dict[str, Any]:
        """List tuned profiles, the newest first."""
        try:
            records = store.profiles()
        except StoreError as error:
            raise _unavailable(error) from error
        return {
            "data": [
                {
                    "name": each.name,
                    "is_active": each.is_active,
                    "model": each.model,
                    "device": each.device,
                    "verdict": each.verdict,
                    "created_at": each.created_at,
                }
                for each in records
            ]
        }

    @router.get("/{name}")
    def profile(name: Annotated[_Name, Path(description="The profile's name.")]) -> dict[str, Any]:
        """Return one profile: settings, whose they are, and what they gain."""
        try:
            record = store.profile(name)
        except StoreError as error:
            raise _unavailable(error) from error
        if record is None:
            raise ApiError(404, "not_found", f"no profile {name!r}", param="name")
        return dict(record.document)

    return router


def _unavailable(error: StoreError) -> ApiError:
    return ApiError(503, "telemetry_unavailable", str(error))
