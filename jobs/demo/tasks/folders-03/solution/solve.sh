#!/bin/bash
set -e
cd /app
mkdir kettle onyx
