"""B0 under MLPerf's own load generator, server scenario."""
