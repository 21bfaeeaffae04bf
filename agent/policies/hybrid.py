"""The playbook as long as it has something to try, then a model."""

from agent.policies import Action, Policy, Stop
from agent.policies.llm import LlmPolicy
from agent.state import RunState


class Hybrid:
    """The first policy leads; the model is asked where the first would stop without an exact verdict, and finishes what it has begun."""

    def __init__(self, name: str, first: Policy, model: LlmPolicy):
        self.name, self.first, self.model = name, first, model

    def decide(self, state: RunState) -> Action:
        if self.model.busy:
            return self.model.decide(state)
        action = self.first.decide(state)
        if not isinstance(action, Stop) or (state.final and state.final.verdict.exact):
            return action
        self.model.lead = f"The playbook stopped here: {action.why}."
        return self.model.decide(state)
