"""Drop-ins for other libraries. Each is imported only on request: ``import lite_ext.integrations.lightning``."""
