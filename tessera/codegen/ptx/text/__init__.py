"""PTX text: builder, register types, thread teams, memory references, entries."""
