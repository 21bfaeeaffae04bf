"""`--policy`: from its text to a policy, or one line on why not."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from agent.errors import UserError
from agent.llm.moves import Approve
from agent.llm.prices import Price, price_of
from agent.llm.settings import LlmSettings
from agent.policies import Policy
from agent.state import folder
from agent.workspace import Workspace

if TYPE_CHECKING:
    from agent.llm.conversation import Model

FORMS = "playbook, anthropic:MODEL, openai:MODEL, chat:MODEL@URL, hybrid, hybrid:POLICY"
KEYS = {"anthropic": "ANTHROPIC_API_KEY", "openai": "OPENAI_API_KEY"}
CHAT_KEY = "CHAT_API_KEY"
"""Optional, and not OPENAI_API_KEY: that one must not travel to whatever address a policy names."""


@dataclass(frozen=True)
class Spec:
    """A policy, taken apart."""

    kind: str
    """playbook, anthropic, openai, chat or replay"""
    model: str = ""
    """For a replay: the run whose answers are played."""
    url: str = ""
    hybrid: bool = False

    @property
    def model_name(self) -> str:
        """As in the price table."""
        return f"{self.kind}:{self.model}" + (f"@{self.url}" if self.url else "")

    @property
    def name(self) -> str:
        """The text that makes this policy again."""
        return ("hybrid:" if self.hybrid else "") + ("playbook" if self.kind == "playbook" else self.model_name)


def parse_spec(text: str, default_model: str | None = None) -> Spec:
    """Raises UserError on a form that is not known. A bare `hybrid` hands over to `default_model`."""
    kind, _, rest = text.partition(":")
    if kind == "hybrid":
        inner = rest or default_model
        if not inner:
            raise UserError("--policy hybrid needs a model: write hybrid:anthropic:MODEL, or set `model` under [llm] in consistency.toml")
        spec = parse_spec(inner)
        if spec.hybrid or spec.kind in ("playbook", "replay"):
            raise UserError(f"unknown policy {text!r}: hybrid hands over to a model, not to {inner}")
        return Spec(spec.kind, spec.model, spec.url, hybrid=True)
    if text == "playbook":
        return Spec("playbook")
    if kind == "chat" and rest:
        parts = re.fullmatch(r"(.+)@(\w+://.*)", rest)  # both may hold an @ of their own
        model, url = parts.groups() if parts else ("", "")
        return Spec("chat", model, _checked(text, model, url))
    if kind in (*KEYS, "replay") and rest and not rest.isspace():
        return Spec(kind, rest)
    raise UserError(f"unknown policy {text!r}; known: {FORMS}")


def _checked(text: str, model: str, url: str) -> str:
    try:
        parts = urlsplit(url)
        usable = bool(model) and parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        parts, usable = urlsplit(""), False
    if not usable:
        raise UserError(f"unknown policy {text!r}: expected chat:MODEL@URL, for example chat:MODEL@http://127.0.0.1:8000/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise UserError(f"the address of --policy chat:{model}@... must hold no credentials, query or fragment; put a key into {CHAT_KEY}")
    return url.rstrip("/")


def check_policy(text: str, settings: LlmSettings, price: str | None = None, environment: Mapping[str, str] = os.environ) -> str:
    """Everything that can be wrong before a run begins: form, key, price. Returns the policy's full name, which makes it again."""
    spec = parse_spec(text, settings.model)
    if spec.kind not in ("playbook", "replay"):
        _key(spec, environment)
        price_of(spec.model_name, price)
    return spec.name


def policy_from_spec(text: str, *, workspace: Workspace, run: str, settings: LlmSettings | None = None, price: str | None = None,
                     approve: Approve | None = None, environment: Mapping[str, str] = os.environ) -> Policy:
    """The policy of a run that has begun. Its trajectory, if there is one, is taken up; so is the price it was begun with, unless another is given.

    Raises UserError on an unknown form, a missing key or an unknown price.
    """
    from agent.policies.hybrid import Hybrid
    from agent.policies.llm import LlmPolicy
    from agent.policies.playbook import Playbook

    settings = settings or LlmSettings()
    spec = parse_spec(text, settings.model)
    if spec.kind == "playbook":
        return Playbook()
    if spec.kind == "replay":
        from agent.llm.recorded import replaying

        return replaying(spec.model, workspace, run, settings, approve)
    model = make_model(spec, settings, environment)
    policy = LlmPolicy(spec.name, model, workspace, run, settings, _price(spec, price, workspace, run), approve)
    return Hybrid(spec.name, Playbook(), policy) if spec.hybrid else policy


def make_model(spec: Spec, settings: LlmSettings, environment: Mapping[str, str] = os.environ) -> "Model":
    """The SDKs are imported here and no earlier: the command line must answer without them."""
    key = _key(spec, environment)
    if spec.kind == "anthropic":
        from agent.llm.anthropic_messages import AnthropicMessages

        return AnthropicMessages(spec.model, key, settings, environment.get("ANTHROPIC_BASE_URL"))
    if spec.kind == "openai":
        from agent.llm.openai_responses import OpenAIResponses

        return OpenAIResponses(spec.model, key, settings, environment.get("OPENAI_BASE_URL"))
    from agent.llm.openai_chat import OpenAIChat

    return OpenAIChat(spec.model, spec.url, key or None, settings)


def _key(spec: Spec, environment: Mapping[str, str]) -> str:
    if spec.kind == "chat":
        return environment.get(CHAT_KEY, "")
    if not (key := environment.get(KEYS[spec.kind], "").strip()):
        raise UserError(f"--policy {spec.name} needs a key; set {KEYS[spec.kind]} in the environment")
    return key


def _price(spec: Spec, given: str | None, workspace: Workspace, run: str) -> Price:
    from agent.llm.trajectory import FOLDER, Trajectory

    if given is None and (folder(workspace, run) / FOLDER / "header.json").exists():
        return Trajectory.load(folder(workspace, run)).header.price
    return price_of(spec.model_name, given)
