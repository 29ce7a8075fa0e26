"""Tables as people have them: the label and the text are found in each, or asked for in one line."""

import json
from pathlib import Path

import pytest

from headprune.core.errors import InvalidValue
from headprune.data.datasets import load_rows
from headprune.data.guess import guess
from headprune.data.labels import number_labels
from tests.tables import QUEUES, TABLES, N, message, queue, table, written


def classifier(folder, classes):
    """The configuration of a classifier of these classes: a guess reads no more of a model."""
    (folder / "model").mkdir()
    id2label = dict(enumerate(classes))
    facts = {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification"],
        "id2label": id2label,
        "label2id": {name: i for i, name in id2label.items()},
    }
    (folder / "model" / "config.json").write_text(json.dumps(facts))
    return str(folder / "model")


@pytest.mark.parametrize("name", TABLES)
def test_the_columns_of_a_table_are_found(name, tmp_path):
    _, _, classes, words = TABLES[name]
    found = guess(classifier(tmp_path, classes), written(tmp_path, name))
    assert found.why[1] == words
    # Every row is read, and its label is one of the model's classes.
    raw = load_rows(found.recipe())
    assert number_labels(found.recipe(), raw).labels == tuple(classes)
    blank = name == "labels with blanks"
    assert sum(len(raw.splits[part]) for part in ("train", "validation", "test")) == N - blank
    dropped = "1 of 40 train rows were dropped: 'message' or 'queue' is empty there"
    assert raw.warnings == ((dropped,) if blank else ())
    # Row numbers are those of the data.
    rows = sorted(row for part in ("train", "validation", "test") for row in raw.parts[part].rows)
    assert rows == [i for i in range(N) if not (blank and i == 7)]


def test_numbers_from_1_on_are_asked_about(tmp_path):
    data = table(tmp_path, ["text,label", *(f"{message(i)},{1 + i % 2}.0" for i in range(N))])
    found = guess(classifier(tmp_path, ("LABEL_0", "LABEL_1")), data)
    assert found.why[1].startswith("label: label (has as many values as the model has classes, 2)")
    with pytest.raises(InvalidValue, match=r"--set 'data.labels=\[1, 2\]' takes 1 for class 0"):
        number_labels(found.recipe(), load_rows(found.recipe()))


@pytest.mark.parametrize(
    ("classes", "label", "numbers"),
    [
        (("2.0", "1.0"), lambda i: 1 + i % 2, {2: 0, 1: 1}),
        (("True", "False"), lambda i: i % 2 == 0, {True: 0, False: 1}),
        (("1", "0"), lambda i: i % 2 == 0, {True: 0, False: 1}),
        (("1", "2", "3"), lambda i: 1 + i % 2, {1: 0, 2: 1}),
    ],
)
def test_a_number_is_the_class_of_that_name(classes, label, numbers, tmp_path):
    data = table(tmp_path, ["text,label", *(f"{message(i)},{label(i)}" for i in range(N))])
    found = guess(classifier(tmp_path, classes), data)
    assert found.why[1] == f"label: label (matches the model's {len(classes)} classes); text: text"
    raw = number_labels(found.recipe(), load_rows(found.recipe()))
    assert (raw.label_ids, raw.labels, raw.numbering) == (numbers, classes, "name")


@pytest.mark.parametrize("values", [(0, 1), (False, True)])
def test_a_number_that_names_another_class_is_asked_about(values, tmp_path):
    data = table(tmp_path, ["text,label", *(f"{message(i)},{values[i % 2]}" for i in range(N))])
    found = guess(classifier(tmp_path, ("1", "2")), data)
    with pytest.raises(InvalidValue, match=f"label {values[1]} may mean class 0 or class 1") as no:
        number_labels(found.recipe(), load_rows(found.recipe()))
    setting = no.value.hint.partition("--set '")[2].partition("'")[0]
    chosen = found.recipe([setting])
    ids = number_labels(chosen, load_rows(chosen)).label_ids
    assert ids == dict(zip(values, (0, 1), strict=True))


@pytest.mark.parametrize(
    ("name", "first", "delimiter"),
    [
        ("rows.csv", "sep=|\r\n", "|"),
        ("rows.csv", '"sep=;"\n', ";"),
        ("rows.TSV", "", "\t"),
    ],
)
def test_the_form_of_a_table_is_read_from_it(name, first, delimiter, tmp_path):
    lines = [delimiter.join(cells) for cells in [("message", "queue"), *map(ticket, range(N))]]
    data = table(tmp_path, [first + lines[0], *lines[1:]], name, encoding="utf-8-sig")
    recipe = guess(classifier(tmp_path, QUEUES), data).recipe()
    assert set(load_rows(recipe).splits["train"][0]) == {"message", "queue"}
    # In a folder, the other files have the same form.
    folder = tmp_path / "splits"
    folder.mkdir()
    (tmp_path / name).rename(folder / f"train{Path(name).suffix}")
    other = "\t" if delimiter == "," else ","
    lines = [other.join(cells) for cells in [("message", "queue"), *map(ticket, range(N))]]
    table(folder, lines, f"test{Path(name).suffix}")
    with pytest.raises(InvalidValue, match=r"data\.path: must be files with the same delimiter"):
        guess(str(tmp_path / "model"), str(folder))


def ticket(i):
    return message(i), queue(i)


def test_none_may_be_a_class(tmp_path):
    classes = ("None", "NA", "null")
    data = table(tmp_path, ["text,label", *(f"{message(i)},{classes[i % 3]}" for i in range(N))])
    raw = load_rows(guess(classifier(tmp_path, classes), data).recipe())
    assert (set(raw.labels), raw.warnings) == (set(classes), ())


def tickets(folder):
    """Two columns fit the model, two hold text, and one counts the rows."""
    lines = [f"{i},{queue(i)},{queue(i + 1)},{message(i)},{message(i + 9)}" for i in range(N)]
    return table(folder, ["id,from,to,subject,answer", *lines])


def test_a_column_that_the_user_names_is_taken_before_any_guess(tmp_path):
    model, data = classifier(tmp_path, QUEUES), tickets(tmp_path)
    found = guess(model, data, label="to", text="answer")
    words = "label: to (as asked); text: answer. Other columns: id, from (could be the label), "
    assert found.why[1] == f"{words}subject"
    pair = guess(model, data, label="from", text="subject", text_pair="answer").recipe()
    assert (pair.data.text, pair.data.label) == (["subject", "answer"], "from")


@pytest.mark.parametrize(
    ("named", "where", "words"),
    [
        ({"text": "answer"}, "--label", "got from, to. The columns are id, from, to, subject,"),
        ({"label": "to", "text": "from", "text_pair": "from"}, "--text, --text-pair", "differ"),
        ({"label": "form"}, "--label", "Did you mean 'from'"),
        ({"label": "to"}, "--text", "Name one, such as --text subject."),
        ({"task": "causal_lm", "label": "to"}, "--label", "left out for the task causal_lm"),
    ],
)
def test_what_is_unclear_is_asked_for_in_one_line(named, where, words, tmp_path):
    with pytest.raises(InvalidValue) as refused:
        guess(classifier(tmp_path, QUEUES), tickets(tmp_path), **named)
    assert refused.value.where == where
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("header", "row", "named", "where"),
    [
        ("text,label", lambda i: f"{message(i)},{i}", {}, "--label"),
        ("text", message, {}, "--label"),
        ("text", message, {"label": "text"}, "--text"),
    ],
)
def test_no_column_is_proposed_where_none_fits(header, row, named, where, tmp_path):
    data = table(tmp_path, [header, *map(row, range(N))])
    with pytest.raises(InvalidValue, match="None of them fits by its contents") as refused:
        guess(classifier(tmp_path, [f"LABEL_{i}" for i in range(N)]), data, **named)
    assert refused.value.where == where
    assert str(refused.value).endswith(f"by its contents; name one: {where} COLUMN.")


def test_the_label_of_a_model_that_grades_is_a_number(tmp_path):
    lines = [f"{i},{message(i)},{i % 2},{i / 8}" for i in range(N)]
    data = table(tmp_path, ["id,message,read,likes", *lines])
    found = guess(classifier(tmp_path, ["LABEL_0"]), data)
    assert found.recipe().task == "regression"
    assert found.why[1].startswith("label: likes (the only one with fractions); text: message.")
