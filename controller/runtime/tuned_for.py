"""`TunedFor`: whom a profile of settings was tuned for, and why another server may not take it.

Owns the comparison. Must not know what the settings are.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TunedFor:
    """A profile's name and the server that it belongs to.

    None leaves a part open; `model` and `device` must be given for any server to take it. `device`,
    `dtype` and `attention_backend` are the server's own names, as its banner shows them. `source`
    is what the model is loaded from, as the server was told (None = its name says that too): a
    server can give any weights any name.
    """

    profile: str
    model: str | None = None
    device: str | None = None
    dtype: str | None = None
    attention_backend: str | None = None
    source: str | None = None

    def refusal(
        self,
        model: str,
        device: str | None = None,
        dtype: str | None = None,
        attention_backend: str | None = None,
        source: str | None = None,
    ) -> str | None:
        """Return why a server of that model may not take the profile, and what to do; None if it
        may. What the server does not know yet is not compared.
        """
        if self.model is None or self.device is None:
            return (
                f"profile {self.profile!r} belongs to no model and device: tune with --model and"
                " --device, or over a run of this server (--run)"
            )
        server = {
            "model": (self.model, model),
            "model source": (self.source or self.model, source),
            "device": (self.device, device),
            "dtype": (self.dtype, dtype),
            "attention backend": (self.attention_backend, attention_backend),
        }
        for name, (mine, theirs) in server.items():
            if mine is not None and theirs is not None and mine != theirs:
                return (
                    f"profile {self.profile!r} belongs to {name} {mine!r}, this server's is"
                    f" {theirs!r}: tune for it, or serve with --profile none"
                )
        return None
