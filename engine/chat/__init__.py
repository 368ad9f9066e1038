"""Conversations: chat turns as token ids that extend one another."""
