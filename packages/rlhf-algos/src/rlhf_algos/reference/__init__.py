"""The reference policy: a frozen copy, the adapter switched off, or log-probs precomputed and cached."""
