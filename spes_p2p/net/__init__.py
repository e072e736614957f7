"""The network, behind one interface (`transport.py`)."""

from spes_p2p.net.hivemind_imports import keep_lean

keep_lean()  # before any module in here imports hivemind
