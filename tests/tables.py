"""Twelve tables as people have them, with the classes of a model for each."""

QUEUES = ("billing", "technical", "sales", "spam mail")
STARS = ("bad", "good")
NLI = ("entailment", "neutral", "contradiction")
N = 40


def message(i):
    return f"please look at my order number {i} again"


def date(i):
    return f"2024-0{1 + i % 9}-{10 + i % 3}"


def queue(i):
    return QUEUES[i % 4]


def table(folder, lines, name="rows.csv", **how):
    (folder / name).write_text("\n".join(lines), newline="", **how)
    return str(folder / name)


TABLES = {
    "message,queue": (
        "message,queue",
        lambda i: f"{message(i)},{queue(i)}",
        QUEUES,
        "label: queue (matches the model's 4 classes); text: message",
    ),
    "with ids": (
        "id,message,queue",
        lambda i: f"{i},{message(i)},{queue(i)}",
        QUEUES,
        "label: queue (matches the model's 4 classes); text: message. Other columns: id",
    ),
    "uids of letters": (
        "uid,text,label",
        lambda i: f"u{i}x,{message(i)},{i % 2}",
        ("LABEL_0", "LABEL_1"),
        "label: label (has the numbers of the model's 2 classes); text: text. Other columns: uid",
    ),
    "dates": (
        "body,class,date",
        lambda i: f"{message(i)},{queue(i).upper()},{date(i)}",
        QUEUES,
        "label: class (matches the model's 4 classes); text: body. Other columns: date",
    ),
    "semicolons": (
        "review;rating",
        lambda i: f"{message(i)}, really;{STARS[i % 2]}",
        STARS,
        "label: rating (matches the model's 2 classes); text: review",
    ),
    "tsv": (
        "message, as sent\tqueue",
        lambda i: f"{message(i)}, thanks\t{queue(i)}",
        QUEUES,
        "label: queue (matches the model's 4 classes); text: message, as sent",
    ),
    "quoted newlines": (
        '"message","queue"',
        lambda i: f'"{message(i)},\n""quoted""",{queue(i)}',
        QUEUES,
        "label: queue (matches the model's 4 classes); text: message",
    ),
    "an index without a name": (
        ",message,queue",
        lambda i: f"{i},{message(i)},{queue(i)}",
        QUEUES,
        "label: queue (matches the model's 4 classes); text: message. Other columns: Unnamed: 0",
    ),
    "labels as floats": (
        "text,label",
        lambda i: f"{message(i)},{i % 2}.0",
        ("LABEL_0", "LABEL_1"),
        "label: label (has the numbers of the model's 2 classes); text: text",
    ),
    "labels with blanks": (
        "message,queue",
        lambda i: f"{message(i)},{'' if i == 7 else f' {queue(i)} '}",
        QUEUES,
        "label: queue (matches the model's 4 classes); text: message",
    ),
    "pairs": (
        "premise,hypothesis,label",
        lambda i: f"{message(i)},no {message(i)},{NLI[i % 3]}",
        NLI,
        "label: label (matches the model's 3 classes); text: premise and hypothesis",
    ),
    "from Excel": (
        "text;label",
        lambda i: f"{message(i)};{STARS[i % 2]}\r",
        STARS,
        "label: label (matches the model's 2 classes); text: text",
    ),
}


def written(folder, name):
    """One of the tables as a file."""
    header, row, _, _ = TABLES[name]
    excel = name == "from Excel"
    lines = [header + ("\r" if excel else ""), *map(row, range(N))]
    ending = "tsv" if name == "tsv" else "csv"
    return table(folder, lines, f"rows.{ending}", encoding="utf-8-sig" if excel else "utf-8")
