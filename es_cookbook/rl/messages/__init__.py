"""Chats of many turns: messages, tools and the token stream of a rollout."""
