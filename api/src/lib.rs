//! An OpenAI-compatible server in which several models write one answer, token by token.
