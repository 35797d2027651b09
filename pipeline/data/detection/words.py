"""Common names of folders, tables and columns that help to recognise classes and labels."""

from __future__ import annotations

from pipeline.data.names import words
from pipeline.data.splits import normalize_word, tokenize_name

# folders around the images of a data set; not classes
WRAPPERS = words(
    """image images img imgs photo photos picture pictures jpg jpeg jpegs png pngs data dataset
    raw all dcim camera"""
)
# whole names of folders that lie beside the class folders and contain no training photos
NO_CLASSES = words(
    """annotation annotations annots segmentation segmentations segmaps labelmaps groundtruth
    groundtruths thumbs thumbnail thumbnails unlabeled unlabelled unsorted
    unclassified unannotated uncategorized tosort depthmaps heatmaps"""
)
# A test folder without labels often has one dummy subfolder, because loaders such as torchvision's
# ImageFolder require class folders. These are its usual names.
WITHOUT_LABELS = NO_CLASSES | frozenset(["all", "images", "imgs", "test", "testing", "unknown"])
# folders that may or may not be classes: if their images do not tell, an error asks the user
PERHAPS_NO_CLASSES = words(
    """mask masks seg segs gt label labels preview previews depth overlay overlays bbox bboxes
    tmp temp backup backups bak rejected discarded duplicates incoming inbox todo pending
    misc extra extras small lowres resized cropped crops augmented thumb trash deleted predict
    infer inference demo samples unknown input inputs target targets output outputs"""
)
# words in names of folders that contain masks, thumbnails or images without labels
NO_CLASS_TOKENS = words(
    """annotation annotations segmentation segmentations groundtruth thumbnail thumbnails thumbs
    unlabeled unlabelled unsorted unclassified unannotated uncategorized mask masks seg gt label
    labels"""
)
# words that mark a mask, a thumbnail or another file that belongs to an image: as the first or last
# word in the name of a file (`1_mask.png`), or anywhere in the name of a column
NO_IMAGE_TOKENS = NO_CLASS_TOKENS | words("""thumb small depth overlay preview heatmap""")
# words in the names of files that list splits
SPLIT_LISTS = words("""split splits fold folds partition partitions setid""")
# words in the names of tables that do not have the labels of images
NO_LABEL_TABLES = words(
    """prediction predictions predicted preds pred submission submissions result results output
    outputs score scores logits attribute attributes attrs classes names categories vocab
    mapping log logs history metrics stats readme requirements license hierarchy"""
)
# words in the names of tables with labels
LABEL_TABLES = words("label labels annotation annotations metadata meta truth groundtruth target")
# names of image columns after `normalize_word`; only the first, `image`, takes precedence: it is
# chosen among several columns of image bytes
IMAGE_COLUMNS = (
    "image",
    "img",
    "file",
    "path",
    "filename",
    "filepath",
    "imagepath",
    "imgpath",
    "imagefile",
    "imagename",
    "imageid",
    "imgname",
    "imgid",
    "photo",
    "picture",
    "id",
)
# names of label columns after `normalize_word`
LABEL_COLUMNS = words(
    """label labels class classname target category labelname y labelid classid categoryid
    categoryname targetname"""
)
# columns to avoid as labels if there is another candidate
NO_LABEL_COLUMNS = words(
    """width height depth channels size bytes filesize xmin ymin xmax ymax x y w h x1 y1 x2 y2 lat
    lon lng latitude longitude date time datetime timestamp year month day age sex gender url link
    author photographer user username license licence camera device md5 sha sha256 hash confidence
    score prob probability index row imageid fold rotation roix1 roiy1
    roix2 roiy2 orientation dpi format mode caption description comment notes"""
)
# columns of a biological taxonomy; the rank `class` is in LABEL_COLUMNS
RANKS = words("""kingdom phylum order family genus species subspecies""")
# words in the names of folders that divide images into parts, such as `part_1` and `images_002`
CHUNK_WORDS = words(
    """part parts batch batches chunk folder dir group volume archive shard patient subject case
    session fold video clip seq sequence scene person user slide new old more extra misc"""
) | (WRAPPERS - {"raw"})  # `raw` beside other folders can be a variant of the same images


def is_part(name: str) -> bool:
    """Return whether a folder is named like a part of the images, for example `part_1`.

    A single letter counts like a number: `part_a`.
    """
    words_of_name = [word.lower() for word in tokenize_name(name) if not word.isdigit()]
    has_chunk_word = any(word in CHUNK_WORDS for word in words_of_name)
    return has_chunk_word and all(len(w) == 1 or w in CHUNK_WORDS for w in words_of_name)


def says_no_labels(table: str) -> bool:
    """Return whether a table's name suggests that it has no labels, such as `predictions.csv`."""
    stem = table.rpartition("/")[2].rpartition(".")[0]
    return any(word.lower() in NO_LABEL_TABLES for word in tokenize_name(stem))


def is_called(name: str, known: frozenset[str]) -> bool:
    """Return whether the normalized name of a folder is among the known words."""
    return normalize_word(name) in known
