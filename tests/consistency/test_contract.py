import pytest

from consistency.contract import Contract, ContractError
from consistency.operators import catalog


def test_round_trip_keeps_both_sides_and_drops_stock():
    contract = Contract.parse('[operators]\nrms_norm = "exact"\nlinear = "stock"\n[training]\nattention = "kernels:mine.fast"\n')
    assert contract == Contract({"rms_norm": "exact"}, {"rms_norm": "exact", "attention": "kernels:mine.fast"})
    assert Contract.parse(contract.dumps()) == contract


def test_side_table_overrides_the_shared_one():
    contract = Contract.parse('[operators]\nlinear = "exact"\n[rollout]\nlinear = "stock"\n')
    assert contract == Contract({}, {"linear": "exact"})


def test_with_and_dict_forms():
    contract = Contract().with_("linear", "exact").with_("linear", "stock", side="rollout")
    assert contract.as_dict() == {"rollout": {}, "training": {"linear": "exact"}}
    assert Contract.from_dict(contract.as_dict()) == contract


@pytest.mark.parametrize(("text", "message"), [
    ("[operators\n", "not valid TOML"),
    ("[engine]\nx = 1\n", "unknown table [engine]"),
    ("[operators]\nlinear = 3\n", "found 3"),
    ("operators = 1\n", "a table must be"),
])
def test_bad_files_say_what_is_wrong(text, message):
    with pytest.raises(ContractError, match=message.replace("[", r"\[").replace("]", r"\]")):
        Contract.parse(text)


def test_missing_file(tmp_path):
    with pytest.raises(ContractError, match="cannot be read"):
        Contract.load(tmp_path / "contract.toml")


@pytest.mark.parametrize(("contract", "message"), [
    (Contract({"softmax": "exact"}), "unknown operator 'softmax'"),
    (Contract({"linear": "fast"}), "no implementation 'fast'"),
])
def test_validate_names_what_is_unknown(contract, message):
    with pytest.raises(ContractError, match=message):
        contract.validate(catalog.known())


def test_every_catalogue_row_can_be_loaded():
    for info in catalog.IMPLEMENTATIONS:
        if info.device == "cpu":
            assert catalog.load(info.operator, info.name, info.side) is not None or info.name == "stock"
