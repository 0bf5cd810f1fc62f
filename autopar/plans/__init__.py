"""Plans: all decisions of a compile as data that is saved, loaded and compared; pins, which fix some of them beforehand."""
