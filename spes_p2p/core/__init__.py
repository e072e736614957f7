"""What every peer computes alike from the ledger: no I/O, no clock, no chance, standard library only."""
