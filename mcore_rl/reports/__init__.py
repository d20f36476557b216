"""Reports about models, for people; several engines or processes take part in each."""
