"""Training: the LightningModule, its optimizer and callbacks."""
