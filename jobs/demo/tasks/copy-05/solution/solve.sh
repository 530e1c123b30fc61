#!/bin/bash
set -e
cd /app
cp daisy.txt field
