"""Child processes: started, spoken to, watched and ended in one way, and never left behind."""
