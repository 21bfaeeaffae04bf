"""consistency.toml: what a workspace is for (model, scale, target) and how much a run may spend."""

import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agent.errors import UserError
from agent.llm.settings import LlmSettings
from sandboxes import Choice

FILE = "consistency.toml"


class Target(BaseModel):
    """When a run may stop."""

    model_config = ConfigDict(extra="forbid")

    throughput: float = Field(default=0.913, gt=0)
    """Least acceptable rollout throughput, as a share of stock on the same machine."""


class Budget(BaseModel):
    """What one `agent run` or `agent resume` may spend before it pauses."""

    model_config = ConfigDict(extra="forbid")

    minutes: float = Field(default=60, ge=0)
    """Wall clock of one call."""
    attempts: int = Field(default=12, ge=0)
    """Attempts started by one call."""


class EngineCheckout(BaseModel):
    """A git checkout of an engine that patches may change, besides the contract."""

    model_config = ConfigDict(extra="forbid")

    path: str
    """Top of the repository."""
    base: str
    """Commit that patches are made against."""
    allow: list[str] = Field(min_length=1)
    """Globs of the paths that may be changed."""


class Config(BaseModel):
    """One workspace's settings; the file is written once, when the workspace is made, and belongs to the user afterwards."""

    model_config = ConfigDict(extra="forbid")

    model: str
    """Family, as listed by `agent models`."""
    scale: str
    """tiny, slice or full."""
    weights: str | None = None
    """Folder of a local Hugging Face checkpoint; absent: seeded weights, made once per machine."""
    policy: str | None = None
    """Who picks the next step; absent: `agent run` asks once if it can, else the playbook does."""
    sandbox: Choice = "auto"
    """Where jobs run; auto: bubblewrap where it works, else local."""
    target: Target = Target()
    budget: Budget = Budget()
    llm: LlmSettings = LlmSettings()
    checkout: EngineCheckout | None = None
    """Absent: the engines are not edited."""

    @classmethod
    def load(cls, path: Path) -> "Config":
        """Raises UserError that names the field, what was found and what is accepted."""
        try:
            return cls.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise UserError(f"{path} does not exist; `agent run --model MODEL --workspace {path.parent}` makes a workspace") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path} is not valid TOML: {error}") from None
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise UserError(f"{path}: {field}: {first['msg']}, found {first['input']!r}") from None

    def dumps(self) -> str:
        lines = [f"model = {_quote(self.model)}", f"scale = {_quote(self.scale)}"]
        if self.weights:
            lines.append(f"weights = {_quote(self.weights)}")
        if self.policy:
            lines.append(f"policy = {_quote(self.policy)}")
        if self.sandbox != "auto":
            lines.append(f"sandbox = {_quote(self.sandbox)}")
        lines += [
            "",
            "[target]",
            f"throughput = {self.target.throughput}  # share of stock",
            "",
            "[budget]  # of one call of `agent run` or `agent resume`",
            f"minutes = {self.budget.minutes}",
            f"attempts = {self.budget.attempts}",
        ]
        if self.checkout:
            allow = ", ".join(map(_quote, self.checkout.allow))
            lines += ["", "[checkout]", f"path = {_quote(self.checkout.path)}", f"base = {_quote(self.checkout.base)}", f"allow = [{allow}]"]
        own = self.llm.model_dump(exclude_defaults=True)
        for table, values in {"llm": own, "llm.limits": own.pop("limits", {})}.items():
            if values:
                lines += ["", f"[{table}]", *(f"{name} = {_quote(v) if isinstance(v, str) else str(v).lower()}" for name, v in values.items())]
        return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    """TOML basic string."""
    escaped = "".join(f"\\u{ord(c):04x}" if ord(c) < 32 or ord(c) == 127 else c for c in text.replace("\\", "\\\\").replace('"', '\\"'))
    return f'"{escaped}"'
