//! The `tojson` filter, writing as Python's `json.dumps(value, ensure_ascii=False)`.

use minijinja::{value::Kwargs, Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::{CompactFormatter, Formatter};
use std::io::{self, Write};

/// `", "` and `": "` between items, raw UTF-8, no HTML escapes, floats as Python prints them;
/// `indent=n` puts each item on its own line.
struct PythonFormatter {
    indent: Option<usize>,
    depth: usize,
    has_items: bool,
    ascii: bool,
}

impl PythonFormatter {
    fn new_line<W: ?Sized + Write>(&self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b"\n")?;
        writer.write_all(" ".repeat(self.indent.unwrap_or(0) * self.depth).as_bytes())
    }

    fn begin<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.has_items = false;
        writer.write_all(bracket)
    }

    fn item<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        match (self.indent, first) {
            (Some(_), true) => self.new_line(writer),
            (Some(_), false) => {
                writer.write_all(b",")?;
                self.new_line(writer)
            }
            (None, true) => Ok(()),
            (None, false) => writer.write_all(b", "),
        }
    }

    fn end<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if self.indent.is_some() && self.has_items {
            self.new_line(writer)?;
        }
        self.has_items = true;
        writer.write_all(bracket)
    }
}

impl Formatter for PythonFormatter {
    fn write_f64<W: ?Sized + Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        writer.write_all(python_float(value).as_bytes())
    }

    fn write_string_fragment<W: ?Sized + Write>(&mut self, writer: &mut W, text: &str) -> io::Result<()> {
        if !self.ascii || text.is_ascii() {
            return CompactFormatter.write_string_fragment(writer, text);
        }
        for unit in text.encode_utf16() {
            match u8::try_from(unit) {
                Ok(byte) if byte.is_ascii() => writer.write_all(&[byte])?,
                _ => write!(writer, "\\u{unit:04x}")?,
            }
        }
        Ok(())
    }

    fn begin_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.begin(writer, b"[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.end(writer, b"]")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.item(writer, first)
    }

    fn end_array_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.has_items = true;
        Ok(())
    }

    fn begin_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.begin(writer, b"{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.end(writer, b"}")
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.item(writer, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.has_items = true;
        Ok(())
    }
}

/// Python's `repr(float)`: the shortest digits that read back, scientific below 1e-4 and from 1e16.
fn python_float(value: f64) -> String {
    if !value.is_finite() {
        let text = if value.is_nan() { "NaN" } else { "Infinity" };
        return if value < 0.0 {
            format!("-{text}")
        } else {
            text.to_owned()
        };
    }
    let magnitude = value.abs();
    if value == 0.0 || (1e-4..1e16).contains(&magnitude) {
        return format!("{value:?}");
    }
    let text = format!("{value:e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let (sign, exponent) = match exponent.strip_prefix('-') {
        Some(rest) => ('-', rest),
        None => ('+', exponent),
    };
    format!("{digits}e{sign}{exponent:0>2}")
}

pub(super) fn tojson(value: Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    let ascii: Option<bool> = kwargs.get("ensure_ascii")?;
    super::finish(&kwargs)?;
    let mut out = Vec::new();
    let formatter = PythonFormatter {
        indent,
        depth: 0,
        has_items: false,
        ascii: ascii.unwrap_or(false),
    };
    value
        .serialize(&mut serde_json::Serializer::with_formatter(&mut out, formatter))
        .map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    String::from_utf8(out)
        .map(Value::from_safe_string)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected texts are those of CPython 3.11's `repr`.
    #[test]
    fn floats_print_as_in_python() {
        for (value, want) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (-2.5, "-2.5"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.00001, "1e-05"),
            (0.0001, "0.0001"),
            (123456789012345.0, "123456789012345.0"),
            (9999999999999998.0, "9999999999999998.0"),
        ] {
            assert_eq!(python_float(value), want);
        }
    }
}
