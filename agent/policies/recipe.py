"""The policy that comes before every other: a shipped contract that fits is measured before anything is searched for."""

from collections.abc import Callable

from agent.policies import Action, Patch, Policy, Verify
from agent.recipes import Recipe
from agent.state import RunState
from agent.tools.patch_kernel import Binding


class RecipeFirst:
    """Stock is measured, then the recipe, in full; whatever that leaves to do is the other policy's, from the recipe's contract if that helped."""

    def __init__(self, policy: Policy, approve: Callable[[Patch], str | None] | None = None):
        """`approve` is asked before the recipe is bound; a reason why not leaves it out."""
        self.name, self.policy, self.approve = policy.name, policy, approve
        self.offered = False

    def decide(self, state: RunState) -> Action:
        if (attempt := state.open_attempt) and attempt.recipe:
            return Verify(level="full")
        if state.recipe is None or state.attempts or self.offered:
            return self.policy.decide(state)
        if state.verify is None:
            return Verify()
        self.offered = True
        if state.verify.verdict.void or state.verify.verdict.mismatches == 0:
            return self.policy.decide(state)
        patch = binding(state.recipe)
        return patch if self.approve is None or self.approve(patch) is None else self.policy.decide(state)


def binding(recipe: Recipe) -> Patch:
    """The patch that takes the empty contract to the recipe's."""
    rollout, training = recipe.contract["rollout"], recipe.contract["training"]
    bindings = [Binding(operator=operator, implementation=name) for operator, name in rollout.items() if training.get(operator) == name]
    bindings += [Binding(operator=operator, implementation=name, side="rollout") for operator, name in rollout.items()
                 if training.get(operator) != name]
    bindings += [Binding(operator=operator, implementation=name, side="training") for operator, name in training.items()
                 if rollout.get(operator) != name]
    return Patch(bindings=bindings, addresses=[], recipe=recipe.name, why=f"shipped as exact: recipe {recipe.name}, sha256:{recipe.sha256}")
