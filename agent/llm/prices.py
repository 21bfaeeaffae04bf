"""What an answer costs: agent/prices.toml, or a price given on the command line. An unknown price is an error, never zero."""

import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agent.errors import UserError
from agent.llm.conversation import Usage

TABLE = Path(__file__).parents[1] / "prices.toml"
MILLION = 1_000_000


class Rates(BaseModel):
    """USD per million tokens."""

    model_config = ConfigDict(extra="forbid")

    input: float = Field(ge=0, allow_inf_nan=False)
    output: float = Field(ge=0, allow_inf_nan=False)
    cache_read: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """None: as input."""
    cache_write: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """None: twice input, the most that a vendor takes."""

    def cost(self, usage: Usage) -> float:
        read = self.input if self.cache_read is None else self.cache_read
        write = 2 * self.input if self.cache_write is None else self.cache_write
        return (usage.input * self.input + usage.output * self.output + usage.cache_read * read + usage.cache_write * write) / MILLION


class LongRates(Rates):
    """Rates of a request with a long input."""

    above: int
    """Tokens of input, cached or not."""


class Price(Rates):
    """One row of the table."""

    long: LongRates | None = None

    def cost(self, usage: Usage) -> float:
        """USD of one answer."""
        if self.long and usage.total - usage.output > self.long.above:
            return self.long.cost(usage)
        return super().cost(usage)


def price_of(model: str, given: str | None = None, table: Path = TABLE) -> Price:
    """The price of a model, `given` (`INPUT,OUTPUT[,CACHE_READ[,CACHE_WRITE]]`) before the table. Raises UserError if there is none."""
    if given is not None:
        return _parse(given)
    if model in (rows := _rows(table)):
        return rows[model]
    raise UserError(f"the price of {model} is unknown; give it with --price INPUT,OUTPUT[,CACHE_READ[,CACHE_WRITE]] in USD per million tokens "
                    "(0,0 for a server of your own)")


def known_models(table: Path = TABLE) -> list[str]:
    """Models with a price, in the table's order."""
    return list(_rows(table))


def _rows(table: Path) -> dict[str, Price]:
    try:
        return {name: Price.model_validate(row) for name, row in tomllib.loads(table.read_text(encoding="utf-8")).items()}
    except (OSError, tomllib.TOMLDecodeError, ValidationError) as error:
        raise UserError(f"{table}: {str(error).splitlines()[0]}") from None


def _parse(text: str) -> Price:
    try:
        figures = [float(part) for part in text.split(",")]
        if not 2 <= len(figures) <= 4:
            raise ValueError
        return Price(**dict(zip(("input", "output", "cache_read", "cache_write"), figures, strict=False)))
    except ValueError:
        raise UserError(f"--price {text}: expected INPUT,OUTPUT[,CACHE_READ[,CACHE_WRITE]] in USD per million tokens, none negative") from None
