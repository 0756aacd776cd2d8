"""What batchscape adds to Hydra. Hydra imports this in every application, so it stays light."""
