"""The MoE language model on torch: its mathematics, losses, optimiser, export and held-out measure."""
