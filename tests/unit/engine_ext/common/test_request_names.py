import pytest

from engine_ext.common.request_names import names_of, stock_names_of

OFFER = "cmpl-x-0-0000000a"
"""P's id of a request whose legs both carry `X-Request-Id: x`."""


def is_found(names: tuple[str, ...], transfer_id: str | None = None) -> bool:
    return bool({*names} & {*names_of(OFFER, transfer_id)})


@pytest.mark.parametrize("request_id", ["cmpl-x-0-0000000d", "cmpl-x-0"])
def test_a_stock_registration_is_not_matched_by_what_a_client_can_choose(request_id: str) -> None:
    assert not is_found(stock_names_of(request_id, None, trusts_request_ids=False))


@pytest.mark.parametrize("request_id", ["cmpl-x-0-0000000d", "cmpl-x-0"])
def test_a_stock_registration_is_matched_by_it_on_the_operators_word(request_id: str) -> None:
    assert is_found(stock_names_of(request_id, None, trusts_request_ids=True))


def test_a_stock_registration_is_matched_by_the_routers_name_for_the_transfer() -> None:
    names = stock_names_of("cmpl-y-0-0000000d", "xfer-1", trusts_request_ids=False)
    assert is_found(names, "xfer-1")
    assert not is_found(names, "xfer-2")


def test_a_stock_registration_is_matched_by_the_id_that_only_p_could_have_told() -> None:
    assert is_found(stock_names_of(OFFER, None, trusts_request_ids=False))


def test_an_id_that_has_no_suffix_is_one_that_a_client_can_choose() -> None:
    """As with VLLM_DISABLE_REQUEST_ID_RANDOMIZATION."""
    assert stock_names_of("cmpl-x-0", None, trusts_request_ids=False) == ()


@pytest.mark.parametrize("remote", ["x", OFFER, "cmpl-x-0"])
def test_our_own_registration_is_matched_by_the_id_without_suffix(remote: str) -> None:
    """P compares the contents before it writes."""
    assert is_found(names_of("cmpl-x-0-0000000d", None, remote))


@pytest.mark.parametrize("request_id", ["transfer xfer-1", "base cmpl-x-0", f"id {OFFER}"])
def test_no_name_can_be_written_in_the_place_of_another_kind(request_id: str) -> None:
    names = stock_names_of(f"{request_id}-0000000d", None, trusts_request_ids=True)
    assert not is_found(names, "xfer-1")
