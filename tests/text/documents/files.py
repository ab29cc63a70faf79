"""Files of the kinds that are read, made by hand."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from io import BytesIO

from PIL import Image

from tests.images.files import file_of


def pdf(pages: Sequence[str]) -> bytes:
    """A PDF file with a line of text for each line of a page."""
    kids = " ".join(f"{4 + 2 * at} 0 R" for at in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, page in enumerate(pages):
        lines = " ".join(f"({line}) Tj 0 -14 Td" for line in page.splitlines())
        stream = f"BT /F1 12 Tf 72 720 Td {lines} ET"
        objects += [
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * number} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>",
            f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream",
        ]
    content, places = b"%PDF-1.4\n", []
    for number, value in enumerate(objects, 1):
        places.append(len(content))
        content += f"{number} 0 obj\n{value}\nendobj\n".encode()
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    return (
        content
        + (
            f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
            f"trailer << /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(content)}\n%%EOF\n"
        ).encode()
    )


def word(body: str) -> bytes:
    """A DOCX file with this body, in which `w:` is the namespace of Word."""
    namespace = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    xml = f'<w:document xmlns:w="{namespace}"><w:body>{body}</w:body></w:document>'
    return archive({"word/document.xml": xml})


def paragraph(text: str, style: str = "") -> str:
    kind = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
    return f"<w:p>{kind}<w:r><w:t>{text}</w:t></w:r></w:p>"


def archive(files: dict[str, str]) -> bytes:
    content = BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, text in files.items():
            zipped.writestr(name, text)
    return content.getvalue()


def scan(pages: Sequence[bytes]) -> bytes:
    """A PDF file whose pages are these JPEG files of 8 x 6 pixels; a page of b"" is blank."""
    kids = " ".join(f"{3 + 3 * at} 0 R" for at in range(len(pages)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode(),
    ]
    for number, jpeg in enumerate(pages):
        first = 3 + 3 * number
        shown = f"/XObject << /I {first + 2} 0 R >>" if jpeg else ""
        drawn = b"q 612 0 0 792 0 0 cm /I Do Q" if jpeg else b""
        objects += [
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {first + 1} 0 R "
            f"/Resources << {shown} >> >>".encode(),
            b"<< /Length %d >>\nstream\n%b\nendstream" % (len(drawn), drawn),
            b"<< /Type /XObject /Subtype /Image /Width 8 /Height 6 /ColorSpace /DeviceRGB "
            b"/BitsPerComponent 8 /Filter /DCTDecode /Length %d >>\nstream\n%b\nendstream"
            % (len(jpeg), jpeg),
        ]
    content, places = b"%PDF-1.4\n", []
    for number, value in enumerate(objects, 1):
        places.append(len(content))
        content += b"%d 0 obj\n%b\nendobj\n" % (number, value)
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    return (
        content
        + (
            f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
            f"trailer << /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(content)}\n%%EOF\n"
        ).encode()
    )


def jpeg(color: str = "white") -> bytes:
    """A JPEG file of 8 x 6 pixels."""
    return file_of(Image.new("RGB", (8, 6), color), "JPEG")
