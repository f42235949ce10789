"""Settings of what `relaygr publish` reads, apart from what reads it: no process needs numpy to read its settings."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr, model_validator

from relaygr.runtime.settings import Section


class RegistrySettings(Section):
    """User and password of the schema registry of topics of Avro, Protobuf or JSON Schema (docs/publishing.md)."""

    username: str | None = Field(None, description="user name for the registry; none: it asks for none")
    password: SecretStr | None = Field(None, description="password for the registry")
    password_file: Path | None = Field(
        None, description="file with the password, instead of password; read when the command starts"
    )

    @model_validator(mode="after")
    def _login_is_whole(self) -> RegistrySettings:
        given = [value for value in (self.password, self.password_file) if value is not None]
        if len(given) > 1:
            raise ValueError("password and password_file are both set: set one of them")
        if (self.username is None) != (not given):
            raise ValueError("set username and password (or password_file), or none of them")
        return self
