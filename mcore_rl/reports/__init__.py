"""Reports about models for people to read: more than one engine or process takes part in each."""
