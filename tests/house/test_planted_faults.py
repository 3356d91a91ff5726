"""The texts of planted faults still occur; with `--full`, each fault is found."""

import pytest

from tests.support import planted_faults


def test_planted_fault_replaces_text_that_occurs_once():
    assert len(planted_faults.FAULTS) >= 40
    for fault in planted_faults.FAULTS:
        assert planted_faults.source_of(fault).count(fault.before) == 1, fault
        assert fault.before != fault.after
        assert (planted_faults.CHECKOUT / "tests" / fault.test).exists(), fault


@pytest.mark.full
@pytest.mark.parametrize("fault", planted_faults.FAULTS, ids=lambda fault: fault.file)
def test_planted_fault_is_found(fault):
    assert planted_faults.is_found(fault)
