class Format:
    HYBRID = "hybrid"


class DelayedScaling:
    def __init__(self, **options: object) -> None:
        self.options = options
