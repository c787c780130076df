"""What several processes do together: messages and errors, sharded policies, files of their parts."""
