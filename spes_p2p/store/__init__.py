"""What a run keeps on disk: ledger, blobs, global states."""
