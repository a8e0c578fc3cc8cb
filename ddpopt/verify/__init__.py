"""The verification suite: any data-parallel mode, held against eager DDP."""
